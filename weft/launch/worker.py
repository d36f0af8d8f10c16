"""The engine process: loads the model, then takes messages in, steps, and sends messages out until it is told to stop.

It begins in `start_worker.py`, which sees to it that it does not outlive the launcher.
"""

from __future__ import annotations

import logging
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import zmq

from weft.assemble.build import build_engine, recv_weights
from weft.config.model import ModelError
from weft.config.options import SettingsError
from weft.config.process import EngineArgs
from weft.engine import guard
from weft.engine.engine import Engine, EngineBroken
from weft.engine.intake import Intake, RecvSkipper
from weft.journal.recorder import RecordedEngine
from weft.launch.heartbeat import HeartbeatSender
from weft.messages.channel import Receiver, RpcSocket, Sender, Sleeper
from weft.messages.codec import FromEngine, decode_to_engine
from weft.messages.replies import StepOutput
from weft.messages.status import EngineFailed
from weft.observe import log
from weft.plan.step import ForwardMode

IDLE_WAIT_S = 3600.0  # an idle engine sleeps until a message comes
LINGER_S = 30.0  # for the last words to leave: the front may still be starting. It hangs up when it has them
RPC_LINGER_S = 2.0


def run(args: EngineArgs) -> None:
    """Until the engine is told to stop, or fails; then the process ends."""
    signal.signal(
        signal.SIGTTOU, signal.SIG_IGN
    )  # a terminal may be told to stop what writes from the background
    log.setup(args.log_level, format=args.log_format)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender = Sender(context, args.from_engine)
    receiver = Receiver(context, args.to_engine, decode_to_engine)
    rpc = RpcSocket(context, args.rpc)
    heartbeat = HeartbeatSender(context, args.from_engine)
    status = 0
    try:
        skipper = RecvSkipper(args.config.recv_interval, recv_weights(args.config))
        built = build_engine(args.config, Path(args.folder))
        sender.send(built.ready)
        heartbeat.start()
        serve(
            built.engine,
            heartbeat,
            Intake(receiver, sender.send, rpc, skipper),
            Sleeper(receiver, rpc, built.wakeup),
        )
    except (ModelError, SettingsError, MemoryError) as exc:
        sender.send(EngineFailed(message=str(exc) or "out of memory", user_error=True))
        status = 2
    except Exception as exc:
        logging.getLogger("weft").error("%s", traceback.format_exc())
        reason = str(exc) if isinstance(exc, EngineBroken) else f"{type(exc).__name__}: {exc}"
        sender.send(EngineFailed(message=f"the engine failed: {reason}"))
        status = 1
    heartbeat.stop()
    sender.close(linger_s=LINGER_S)
    receiver.close()
    rpc.close(linger_s=RPC_LINGER_S)
    context.term()
    os._exit(status)  # no thread of the device may hold the end up


def serve(
    engine: Engine | RecordedEngine, heartbeat: HeartbeatSender, intake: Intake, sleeper: Sleeper
) -> None:
    """Take in what has come, run one step, send what came of it; sleep while there is nothing to do."""
    while not engine.is_stopped:
        wait_s = engine.wait_s
        if wait_s > 0:
            sleeper.wait(min(wait_s, IDLE_WAIT_S))
        _take_in(engine, intake, None if wait_s > 0 else engine.last_mode)
        began = time.monotonic()
        with heartbeat:
            replies = engine.step()
        for reply in replies:
            for piece in reply.pieces() if isinstance(reply, StepOutput) else (reply,):
                _answer(engine, piece, intake.send)
        if engine.min_step_s and engine.has_work:
            _slow_down(engine, intake, sleeper, began)


def _take_in(
    engine: Engine | RecordedEngine, intake: Intake, last_mode: ForwardMode | None = None
) -> None:
    for message in intake.recv_requests(last_mode):
        reply = engine.submit(message)
        if reply is not None:
            _answer(engine, reply, intake.send)


def _answer(
    engine: Engine | RecordedEngine, reply: FromEngine, send: Callable[[FromEngine], None]
) -> None:
    """Send a reply. One that cannot be sent ends what it is about, and nothing else."""
    try:
        send(reply)
    except Exception as exc:
        for instead in guard.unsent(engine, reply, exc):
            send(instead)


def _slow_down(
    engine: Engine | RecordedEngine, intake: Intake, sleeper: Sleeper, began: float
) -> None:
    """Sleep until the step that `began` then has taken as long as it must; what comes meanwhile is taken in."""
    while (left_s := began + engine.min_step_s - time.monotonic()) > 0:
        if sleeper.wait(left_s):
            _take_in(engine, intake)

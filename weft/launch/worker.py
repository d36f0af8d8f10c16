"""The engine process: loads the model, then receives messages, steps, and sends messages until a
message asks it to stop.

    sockets ─▶ Intake ─▶ Engine.submit
                         Engine.step ─▶ pieces ─▶ sockets

`start_worker.py` is its entry point, and ensures that it does not outlive the launcher. This module
does not know the meaning of the messages.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import zmq

from weft.assemble.build import build_engine
from weft.assemble.ranks import StartedRanks
from weft.config.engine_args import EngineArgs
from weft.config.model import ModelError
from weft.config.options import SettingsError
from weft.engine.engine import Engine
from weft.engine.guard import EngineBroken, replace_unsent
from weft.engine.intake import Intake
from weft.journal.recorder import RecordedEngine
from weft.launch.heartbeat import HeartbeatSender
from weft.messages.channel import Receiver, RpcSocket, Sender, Sleeper
from weft.messages.codec import FromEngine, decode_to_engine
from weft.messages.replies import StepOutput
from weft.messages.status import EngineFailed
from weft.observe import garbage, log
from weft.ops.sharding import RankLost
from weft.parallel.peers import Peers

IDLE_WAIT_S = 3600.0  # maximal sleep of an idle engine; a message ends it
REST_S = 1.0  # a server that has been idle for so long has time for what only some requests need
# Seconds for which a thread that compiles a grammar keeps the interpreter while a step waits for
# it, which it may do several times; Python's default is 5 ms.
SWITCH_S = 0.0005
# Time to send the last replies: the front may still be starting. It hangs up when it has them.
LINGER_S = 30.0
RPC_LINGER_S = 2.0

AnyEngine: TypeAlias = Engine | RecordedEngine
Send: TypeAlias = Callable[[FromEngine], None]


def run(args: EngineArgs, at_end: Callable[[Callable[[], object]], None]) -> None:
    """Serve until a message asks the engine to stop, or until it fails; then the process ends.
    `at_end` takes a call to make if the process ends because the launcher does."""
    sys.setswitchinterval(SWITCH_S)
    garbage.freeze_modules()
    # A terminal may be configured to stop a background process that writes to it.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    log.setup(args.log_level, format=args.log_format)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender = Sender(context, args.from_engine)
    receiver = Receiver(context, args.to_engine, decode_to_engine)
    rpc = RpcSocket(context, args.rpc)
    heartbeat = HeartbeatSender(context, args.from_engine)
    failure: EngineFailed | None = None
    ranks: StartedRanks | None = None
    try:
        built = build_engine(args.config, Path(args.folder), _peers(args))
        ranks = built.ranks
        if ranks is not None:
            ranks.on_lost(partial(_end_for_lost_rank, args.from_engine, ranks))
            at_end(ranks.take_leave)
        gc.enable()  # `start_worker.py` has disabled it
        sender.send(built.ready)
        heartbeat.start(() if ranks is None else ranks.pids)
        intake = Intake(receiver, sender.send, rpc)
        sleeper = Sleeper(receiver, rpc, built.wakeup)
        serve(built.engine, heartbeat, intake, sleeper, built.at_rest)
    except Exception as exc:
        failure = _describe(exc)
        sender.send(failure)
    if ranks is not None:
        ranks.close("" if failure is None else failure.message)
    heartbeat.stop()
    sender.close(linger_s=LINGER_S)
    receiver.close()
    rpc.close(linger_s=RPC_LINGER_S)
    context.term()
    # End immediately: no thread of the device may delay it.
    os._exit(_exit_status(failure))


def _peers(args: EngineArgs) -> Peers | None:
    """The other engines, if the engines divide the experts of one model."""
    if not args.peers:
        return None
    ends = {
        rank: socket.socket(fileno=number) for rank, number in enumerate(args.peers) if number >= 0
    }
    return Peers(args.peers.index(-1), ends, args.config.dist_timeout)


def _end_for_lost_rank(address: str, ranks: StartedRanks, reason: str) -> None:
    """End the process because a rank is lost. Runs on its own thread with its own sockets: the main
    thread may be waiting for that rank. The front gets the message before the other nodes: its
    clients wait, and another node may never answer."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender = Sender(context, address)
    sender.send(EngineFailed(message=f"the engine failed: {reason}"))
    sender.close(linger_s=RPC_LINGER_S)
    context.term()
    ranks.take_leave(reason)
    os._exit(1)


def _describe(exc: Exception) -> EngineFailed:
    """The message for the front why the engine ends: an error of the user, or a failure of weft."""
    if isinstance(exc, ModelError | SettingsError | MemoryError):
        return EngineFailed(message=str(exc) or "out of memory", user_error=True)
    if isinstance(exc, RankLost):  # a traceback of this rank does not show why another was lost
        return EngineFailed(message=f"the engine failed: {exc}")
    logging.getLogger("weft").error("%s", traceback.format_exc())
    reason = f"{type(exc).__name__}: {exc}"
    if isinstance(exc, EngineBroken):
        reason = str(exc)
    return EngineFailed(message=f"the engine failed: {reason}")


def _exit_status(failure: EngineFailed | None) -> int:
    if failure is None:
        return 0
    return 2 if failure.user_error else 1


def serve(
    engine: AnyEngine,
    heartbeat: HeartbeatSender,
    intake: Intake,
    sleeper: Sleeper,
    at_rest: Callable[[], object] | None,
) -> None:
    """Loop: receive messages, run one step, send its replies; sleep while there is no work. The
    first rest of `REST_S` calls `at_rest`."""
    while not engine.is_stopped:
        wait_s = min(engine.wait_s, IDLE_WAIT_S)
        if at_rest is not None and wait_s > REST_S and not engine.has_work:
            if not sleeper.wait(REST_S):
                at_rest()
                at_rest = None
        elif wait_s > 0:
            sleeper.wait(wait_s)
        _receive(engine, intake)
        began_s = time.monotonic()
        with heartbeat:
            replies = engine.step()
        for reply in replies:
            _answer_in_pieces(engine, reply, intake.send)
        if engine.min_step_s and engine.has_work:
            _slow_down(engine, intake, sleeper, began_s)


def _receive(engine: AnyEngine, intake: Intake) -> None:
    """Submit the messages that have arrived to the engine."""
    for message in intake.recv_requests():
        reply = engine.submit(message)
        if reply is not None:
            _answer(engine, reply, intake.send)


def _answer_in_pieces(engine: AnyEngine, reply: FromEngine, send: Send) -> None:
    if not isinstance(reply, StepOutput):
        _answer(engine, reply, send)
        return
    for piece in reply.pieces():
        _answer(engine, piece, send)


def _answer(engine: AnyEngine, reply: FromEngine, send: Send) -> None:
    """Send a reply. If it cannot be sent, only the requests in it end."""
    try:
        send(reply)
    except Exception as exc:
        for replacement in replace_unsent(reply, exc, engine.lose):
            send(replacement)


def _slow_down(engine: AnyEngine, intake: Intake, sleeper: Sleeper, began_s: float) -> None:
    """Sleep until the step that began at `began_s` has taken `min_step_s`; submit messages that
    arrive meanwhile."""
    while (left_s := began_s + engine.min_step_s - time.monotonic()) > 0:
        if sleeper.wait(left_s):
            _receive(engine, intake)

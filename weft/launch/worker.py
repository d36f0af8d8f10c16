"""The engine process: loads the model, then takes messages in, steps, and sends messages out until it is told to stop.

Started by `engine_process.py` with one line of JSON on standard input. End of file there means that the launcher is
gone: the process ends at once, whatever it is doing.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

import zmq

from weft.config.model import ModelError
from weft.config.options import SettingsError
from weft.config.process import EngineArgs
from weft.executor.plan import ForwardMode
from weft.launch.build import build_engine, recv_weights
from weft.launch.pulse import Heart
from weft.messages.channel import Receiver, RpcSocket, Sender, Sleeper
from weft.messages.codec import decode_to_engine
from weft.messages.control import EngineFailed
from weft.messages.replies import StepOutput
from weft.observe import log
from weft.scheduler.service.engine import Engine, EngineBroken
from weft.scheduler.service.intake import Intake, RecvSkipper
from weft.scheduler.service.journal import RecordedEngine

IDLE_WAIT_S = 3600.0  # an idle engine sleeps until a message comes
LINGER_S = 2.0  # for the last replies to leave
PR_SET_PDEATHSIG = 1


def main() -> None:
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit("the engine process is started by weft itself")
    args = EngineArgs.from_json(line)
    _die_with_parent()
    log.setup(args.log_level, format=args.log_format)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender = Sender(context, args.from_engine)
    receiver = Receiver(context, args.to_engine, decode_to_engine)
    rpc = RpcSocket(context, args.rpc)
    heart = Heart(context, args.from_engine)
    status = 0
    try:
        skipper = RecvSkipper(args.config.recv_interval, recv_weights(args.config))
        built = build_engine(args.config, Path(args.folder))
        sender.send(built.ready)
        heart.start()
        serve(built.engine, heart, Intake(receiver, sender.send, rpc, skipper), Sleeper(receiver, rpc, built.bell))
    except (ModelError, SettingsError, MemoryError) as exc:
        sender.send(EngineFailed(message=str(exc) or "out of memory", user_error=True))
        status = 2
    except Exception as exc:
        logging.getLogger("weft").error("%s", traceback.format_exc())
        reason = str(exc) if isinstance(exc, EngineBroken) else f"{type(exc).__name__}: {exc}"
        sender.send(EngineFailed(message=f"the engine failed: {reason}"))
        status = 1
    heart.stop()
    sender.close(linger_s=LINGER_S)
    receiver.close()
    rpc.close(linger_s=LINGER_S)
    context.term()
    os._exit(status)  # no thread of the device may hold the end up


def serve(engine: Engine | RecordedEngine, heart: Heart, intake: Intake, sleeper: Sleeper) -> None:
    """Take in what has come, run one step, send what came of it; sleep while there is nothing to do."""
    while not engine.is_stopped:
        wait_s = engine.wait_s
        if wait_s > 0:
            sleeper.wait(min(wait_s, IDLE_WAIT_S))
        _take_in(engine, intake, None if wait_s > 0 else engine.last_mode)
        began = time.monotonic()
        with heart:
            replies = engine.step()
        for reply in replies:
            for piece in reply.pieces() if isinstance(reply, StepOutput) else (reply,):
                intake.send(piece)
        if engine.min_step_s and engine.has_work:
            _slow_down(engine, intake, sleeper, began)


def _take_in(engine: Engine | RecordedEngine, intake: Intake, last_mode: ForwardMode | None = None) -> None:
    for message, answer in intake.recv_requests(last_mode):
        reply = engine.submit(message)
        if reply is not None:
            answer(reply)


def _slow_down(engine: Engine | RecordedEngine, intake: Intake, sleeper: Sleeper, began: float) -> None:
    """Sleep until the step that `began` then has taken as long as it must; what comes meanwhile is taken in."""
    while (left_s := began + engine.min_step_s - time.monotonic()) > 0:
        if sleeper.wait(left_s):
            _take_in(engine, intake)


def _die_with_parent() -> None:
    """End when the launcher does: on Linux the kernel sees to it, elsewhere the closed pipe."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch_parent, name="parent-watch", daemon=True).start()


def _watch_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()

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
import traceback
from contextlib import suppress
from pathlib import Path

import zmq

from weft.config.model import ModelError
from weft.config.options import SettingsError
from weft.config.process import EngineArgs
from weft.launch.build import build_engine
from weft.messages.channel import Receiver, Sender
from weft.messages.codec import ToEngine, decode_to_engine
from weft.messages.control import EngineFailed
from weft.observe import log
from weft.scheduler.service.engine import Engine, EngineBroken
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
    log.setup(args.log_level)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender = Sender(context, args.from_engine)
    receiver = Receiver(context, args.to_engine, decode_to_engine)
    status = 0
    try:
        built = build_engine(args.config, Path(args.folder))
        sender.send(built.ready)
        serve(built.engine, receiver, sender)
    except (ModelError, SettingsError, MemoryError) as exc:
        sender.send(EngineFailed(message=str(exc) or "out of memory", user_error=True))
        status = 2
    except Exception as exc:
        logging.getLogger("weft").error("%s", traceback.format_exc())
        reason = str(exc) if isinstance(exc, EngineBroken) else f"{type(exc).__name__}: {exc}"
        sender.send(EngineFailed(message=f"the engine failed: {reason}"))
        status = 1
    sender.close(linger_s=LINGER_S)
    receiver.close()
    context.term()
    os._exit(status)  # no thread of the device may hold the end up


def serve(engine: Engine | RecordedEngine, receiver: Receiver[ToEngine], sender: Sender) -> None:
    """Take in what has come, run one step, send what came of it; sleep while there is nothing to do."""
    while not engine.is_stopped:
        if not engine.has_work:
            receiver.wait(IDLE_WAIT_S)
        for message in receiver.drain():
            reply = engine.submit(message)
            if reply is not None:
                sender.send(reply)
        for reply in engine.step():
            sender.send(reply)


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

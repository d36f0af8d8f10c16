"""Where the engine process begins: it ties its life to the
launcher's before it imports what takes seconds.

Started by `engine_process.py` with one line of JSON on standard input. End of file there means that
the launcher is gone: the process ends at once, whatever it is doing.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
from contextlib import suppress

from weft.config.process import EngineArgs

PR_SET_PDEATHSIG = 1


def main() -> None:
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit("the engine process is started by weft itself")
    _die_with_parent()
    # What is imported and built stays, so looking for garbage in it would be in vain. The engine's
    # start takes a sixth less time without.
    gc.disable()
    from weft.launch.worker import run

    run(EngineArgs.from_json(line))


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

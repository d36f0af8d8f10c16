"""Where the engine process begins: it ties its life to the
launcher's before it imports what takes seconds.

Started by `engine_process.py`, which writes one line of JSON to standard input as soon as it knows
what is to be served; the imports do not wait for it. End of file there means that
the launcher is gone: the process ends at once, whatever it is doing.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

PR_SET_PDEATHSIG = 1
TORCH_LIBRARY = "lib/libtorch_cpu.so"  # in the folder of torch


class LastAct:
    """What a process does before it ends with its parent; nothing, until somebody says so."""

    def __init__(self) -> None:
        self._call: Callable[[], object] | None = None

    def set(self, call: Callable[[], object]) -> None:
        self._call = call

    def do(self) -> None:
        if self._call is not None:
            self._call()


def main() -> None:
    lines: SimpleQueue[bytes] = SimpleQueue()
    last_act = LastAct()
    die_with_parent(lines, last_act)
    # What is imported and built stays, so looking for garbage in it would be in vain. The engine's
    # start takes a sixth less time without.
    gc.disable()
    threading.Thread(target=_load_torch_library, name="torch-library", daemon=True).start()
    from weft.config.process import EngineArgs
    from weft.launch.worker import run

    run(EngineArgs.from_json(lines.get()), last_act.set)


def die_with_parent(lines: SimpleQueue[bytes], last_act: LastAct | None = None) -> None:
    """End when the launcher does: on Linux the kernel sees to it, elsewhere the closed pipe. Where
    the launcher hangs up and lives on for a moment, there is time for a last act."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    watch = threading.Thread(
        target=_listen, args=(lines, last_act or LastAct()), name="parent-watch", daemon=True
    )
    watch.start()


def _listen(lines: SimpleQueue[bytes], last_act: LastAct) -> None:
    """Pass on the launcher's line, then wait for its end."""
    line = sys.stdin.buffer.readline()
    if not line:
        print("the engine process is started by weft itself", file=sys.stderr, flush=True)
        os._exit(1)
    lines.put(line)
    while os.read(sys.stdin.fileno(), 4096):
        pass
    with suppress(Exception):
        last_act.do()
    os._exit(0)


def _load_torch_library() -> None:
    """Load the library that `import torch` is going to need, while other modules are imported.

    It is large: a fifth of a second. An import would hold the interpreter's lock for as long; a
    call of a foreign function does not. If it fails, the import will say so.
    """
    if sys.platform != "linux":
        return
    with suppress(ImportError, OSError, AttributeError):
        torch = importlib.util.find_spec("torch")
        if torch is None or torch.origin is None:
            return
        library = Path(torch.origin).parent / TORCH_LIBRARY
        load = ctypes.CDLL(None).dlopen
        load.restype = ctypes.c_void_p
        load(bytes(library), os.RTLD_NOW)


if __name__ == "__main__":
    main()

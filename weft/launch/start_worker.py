"""The entry point of the engine process. It ensures that the process ends with the launcher before
it imports modules that take seconds.

`engine_process.py` starts it, and writes one line of JSON to standard input when it knows the
settings; the imports do not wait for that line. End of file on standard input means that the
launcher is gone: the process ends immediately, whatever it is doing.
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
TORCH_LIBRARY = "lib/libtorch_cpu.so"  # path in the folder of torch


class LastAct:
    """A call that the process makes before it ends with its parent. None until `set`."""

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
    # Imported modules and built objects stay, so collecting garbage among them finds nothing.
    # Without it, the engine starts in a sixth less time.
    gc.disable()
    threading.Thread(target=_load_torch_library, name="torch-library", daemon=True).start()
    from weft.ops import meta_kernels
    from weft.weights.known import MINILM, SMOLLM2

    meta_kernels.defer(SMOLLM2.module, MINILM.module)
    from weft.config.engine_args import EngineArgs
    from weft.launch.worker import run

    run(EngineArgs.from_json(lines.get()), last_act.set)


def die_with_parent(lines: SimpleQueue[bytes], last_act: LastAct | None = None) -> None:
    """End this process when the launcher ends: on Linux by the kernel (PR_SET_PDEATHSIG), elsewhere
    by the closed pipe. If the launcher closes the pipe and lives on for a moment, `last_act` runs
    first."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    watch = threading.Thread(
        target=_listen, args=(lines, last_act or LastAct()), name="parent-watch", daemon=True
    )
    watch.start()


def _listen(lines: SimpleQueue[bytes], last_act: LastAct) -> None:
    """Put the launcher's line into `lines`, then wait until the launcher closes the pipe."""
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
    """Load the library that `import torch` will need, while other modules are imported.

    Loading it takes a fifth of a second. An import would hold the interpreter's lock for that time;
    a foreign function call does not. If it fails here, the import reports the error.
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

"""Loads the kernel library and runs programs with it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from weft.ops.cpp.abi import KIND_OF, Op, OpKind, PackArgs, Step
from weft.ops.cpp.build import CannotBuild, find_or_build

OPENMP_FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


class Unavailable(Exception):
    """The library cannot be used on this machine; the text says why."""


class Library:
    """The kernels of one instruction set. One program runs at a time, on the thread that calls."""

    def __init__(self, path: Path, instruction_set: str = "") -> None:
        """`instruction_set`: one by name, or "" for the best that the processor has. Raises `Unavailable`."""
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as exc:
            raise Unavailable(f"{path} cannot be loaded: {exc}") from exc
        self._library.weft_chosen.restype = ctypes.c_char_p
        self._library.weft_sizeof.restype = ctypes.c_int64
        self._library.weft_sizeof.argtypes = [ctypes.c_int64]
        self._run = self._library.weft_run
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int]
        if self._library.weft_choose(instruction_set.encode()):
            raise Unavailable(f"this processor has no {instruction_set}" if instruction_set else "no instruction set fits")
        self.shares_threads = self._join_openmp()

    @property
    def instruction_set(self) -> str:
        return str(self._library.weft_chosen().decode())

    def size_of(self, index: int) -> int:
        """Bytes of the structure with this number in program.h."""
        return int(self._library.weft_sizeof(index))

    def run(self, ops: int, num_ops: int, step: Step) -> None:
        """Run `num_ops` operations from the address `ops`. Raises MemoryError."""
        if self._run(ops, num_ops, ctypes.addressof(step), torch.get_num_threads()):
            raise MemoryError("the kernels ran out of memory")

    def run_one(self, args: ctypes.Structure, step: Step, kind: OpKind | None = None) -> None:
        """Run one operation; `kind` where its structure does not tell."""
        op = Op(KIND_OF[type(args)] if kind is None else kind, ctypes.addressof(args))
        self.run(ctypes.addressof(op), 1, step)

    def pack(self, args: PackArgs) -> None:
        self.run_one(args, Step(), OpKind.PACK_WEIGHT)

    def unpack(self, args: PackArgs) -> None:
        self.run_one(args, Step(), OpKind.UNPACK_WEIGHT)

    def _join_openmp(self) -> bool:
        """Hand the library the threads of the OpenMP runtime that torch has loaded. False: it has one thread."""
        for path in _loaded_openmp():
            try:
                openmp = ctypes.CDLL(path)
                found = [ctypes.cast(getattr(openmp, name), ctypes.c_void_p) for name in OPENMP_FUNCTIONS]
            except (OSError, AttributeError):
                continue
            self._library.weft_use_openmp(*found)
            return True
        return False


@cache
def load(instruction_set: str = "") -> Library:
    """The library of this machine, built if need be. Raises `Unavailable`."""
    try:
        path = find_or_build()
    except CannotBuild as exc:
        raise Unavailable(str(exc)) from exc
    return Library(path, instruction_set)


def _loaded_openmp() -> Sequence[str]:
    """Paths of the OpenMP runtimes in this process. GNU's, or LLVM's and Intel's, which know its function names too."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ()
    paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in maps if line.count("/"))
    return [path for path in paths if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))]

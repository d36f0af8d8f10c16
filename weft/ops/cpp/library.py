"""Loads the kernel library and runs programs with it.

Knows the functions that the library exports and what they return; not what an operation computes.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import NoReturn

import torch

from weft.ops.cpp.abi import (
    KIND_OF,
    FusedStep,
    Guesses,
    Op,
    OpKind,
    PackArgs,
    StepArgs,
)
from weft.ops.cpp.build import CannotBuild, find_or_build, processor_flags, sets_here
from weft.ops.cpp.timing import Timings
from weft.ops.cpp.weight_memory import WeightMemory
from weft.ops.sharding import RankLost

OUT_OF_MEMORY = "the kernels ran out of memory"
UNSOUND = -2  # weft_run_fused returns it for a plan that it refuses
LOST = -3  # another rank did not take part


class Unavailable(Exception):
    """The library cannot be used on this machine; the message gives the reason."""


class Library:
    """The kernels of one instruction set.

    A program runs on the calling thread and on the threads of the library. Only one program runs at
    a time in the whole process.
    """

    def __init__(self, path: Path, instruction_set: str = "") -> None:
        """`instruction_set`: a name, or "" for the best set that the processor has.

        Raises `Unavailable`.
        """
        self.path = path
        self.memory = WeightMemory()
        self.timings: Timings | None = None  # records the times of all operations; None: off
        # Threads that compute together, including the caller's; 0: the number that torch uses.
        self.num_threads = 0
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as exc:
            raise Unavailable(f"{path} cannot be loaded: {exc}") from exc
        self._library.weft_name.restype = ctypes.c_char_p
        self._run = self._library.weft_run
        self._run.argtypes = [
            ctypes.c_int,  # instruction set
            ctypes.c_void_p,  # operations
            ctypes.c_int64,
            ctypes.c_void_p,  # step
            ctypes.c_int,  # threads
            ctypes.c_void_p,  # times
        ]
        self._run_fused = self._library.weft_run_fused
        self._run_fused.argtypes = [
            ctypes.c_int,  # instruction set
            ctypes.c_void_p,  # fused step
            ctypes.c_int,  # threads
            ctypes.c_void_p,  # times
        ]
        self._run_guesses = self._library.weft_run_guesses
        self._run_guesses.argtypes = [
            ctypes.c_int,  # instruction set
            ctypes.c_void_p,  # first fused step
            ctypes.c_void_p,  # guesses
            ctypes.c_int,  # threads
            ctypes.c_void_p,  # times
        ]
        self._set = int(self._library.weft_find(instruction_set.encode()))
        if self._set < 0 and instruction_set:
            has = all(one.needs <= processor_flags() for one in sets_here(instruction_set))
            who = f"the library {path}" if has else "this processor"
            raise Unavailable(f"{who} has no {instruction_set}")
        if self._set < 0:
            raise Unavailable("no instruction set fits")

    @property
    def instruction_set(self) -> str:
        return str(self._library.weft_name(self._set).decode())

    def run(
        self,
        ops: int,
        num_ops: int,
        step: StepArgs,
    ) -> None:
        """Run `num_ops` operations from the address `ops`. Raises MemoryError."""
        timings = self.timings
        times = None
        if timings is not None:
            times = timings.begin(((ops, num_ops),))
        failed = self._run(
            self._set,
            ops,
            num_ops,
            ctypes.addressof(step),
            self._threads,
            times,
        )
        if timings is not None:
            timings.end()
        if failed:
            _raise_for(failed)

    def run_fused(self, step: FusedStep) -> None:
        """Run a whole step, from plan to tokens. Raises MemoryError."""
        timings = self.timings
        times = None
        if timings is not None:
            programs = ((step.body, step.num_body), (step.head, step.num_head))
            times = timings.begin(programs, is_step=True)
        failed = self._run_fused(
            self._set,
            ctypes.addressof(step),
            self._threads,
            times,
        )
        if timings is not None:
            timings.end()
        if failed:
            _raise_for(failed)

    def run_guesses(self, first: FusedStep, guesses: Guesses, num_steps: int) -> None:
        """Run a chain of `num_steps` whole steps, each of which computes what the one before has
        drawn. Raises MemoryError."""
        timings = self.timings
        times = None
        if timings is not None:
            programs = ((first.body, first.num_body), (first.head, first.num_head))
            times = timings.begin(num_steps * programs, is_step=True)
        failed = self._run_guesses(
            self._set,
            ctypes.addressof(first),
            ctypes.addressof(guesses),
            self._threads,
            times,
        )
        if timings is not None:
            timings.end()
        if failed:
            _raise_for(failed)

    @property
    def _threads(self) -> int:
        return self.num_threads or torch.get_num_threads()

    def run_one(
        self,
        args: ctypes.Structure,
        step: StepArgs,
        kind: OpKind | None = None,
    ) -> None:
        """Run one operation. `kind` is needed if several kinds share the structure."""
        if kind is None:
            kind = KIND_OF[type(args)]
        op = Op(kind, ctypes.addressof(args))
        self.run(ctypes.addressof(op), 1, step)

    def pack(self, args: PackArgs) -> None:
        """Quantise and pack rows of a plain matrix into a weight."""
        self.run_one(args, StepArgs(), OpKind.PACK_WEIGHT)

    def unpack(self, args: PackArgs) -> None:
        """Copy rows of a weight into a plain float32 matrix."""
        self.run_one(args, StepArgs(), OpKind.UNPACK_WEIGHT)


def _raise_for(failed: int) -> NoReturn:
    """Raises RankLost, or MemoryError."""
    assert failed != UNSOUND, "a plan that contradicts itself, or leaves its tables"
    if failed == LOST:
        raise RankLost("another rank did not take part in the step")
    raise MemoryError(OUT_OF_MEMORY)


@cache
def load(instruction_set: str = "") -> Library:
    """The library for this machine. Builds it if necessary. Raises `Unavailable`."""
    try:
        path = find_or_build(instruction_set)
    except CannotBuild as exc:
        raise Unavailable(str(exc)) from exc
    return Library(path, instruction_set)

"""Programs: operations recorded once, run at every step with one call.

While a program is recorded, operations write to buffers with room for `capacity` tokens. Nothing is
computed; what is kept of a buffer is its address. A step then runs the same operations on its own
number of tokens.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.ops.cpp.abi import KIND_OF, Op, StepArgs
from weft.ops.cpp.library import Library


class Program:
    """A list of operations, and all that their addresses point to."""

    def __init__(self, args: Sequence[ctypes.Structure], keep: Sequence[object]) -> None:
        self.args = args
        self._keep = keep
        self._ops = (Op * len(args))(
            *(Op(KIND_OF[type(one)], ctypes.addressof(one)) for one in args)
        )
        self.address = ctypes.addressof(self._ops)  # stays: the array is kept

    def run(self, library: Library, step: StepArgs) -> None:
        """Raises MemoryError."""
        library.run(self.address, len(self.args), step)

    def run_part(self, library: Library, step: StepArgs, begin: int, end: int) -> None:
        """Run its operations begin..end-1. Raises MemoryError."""
        address = self.address + begin * ctypes.sizeof(Op)
        library.run(address, end - begin, step)

    def then(self, *args: ctypes.Structure) -> Program:
        """A program that does this one's operations and then some more."""
        return Program([*self.args, *args], [self])


class ProgramRecorder:
    """Collects operations and hands out buffers. A buffer is reused once its tensor is no longer
    held: operations run in the order of recording, so all operations that read it are recorded by
    then."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._args: list[ctypes.Structure] = []
        self._buffers: list[Tensor] = []
        # By number of columns and type.
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._scratch_users: list[ctypes.Structure] = []

    @property
    def num_ops(self) -> int:
        """Operations that have been recorded."""
        return len(self._args)

    def add(self, args: ctypes.Structure) -> None:
        self._args.append(args)

    def keep(self, tensor: Tensor) -> Tensor:
        """The same, which lives as long as the program."""
        self._buffers.append(tensor)
        return tensor

    def buffer(self, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor [capacity, columns] that is the caller's as long as it is held."""
        free = self._free[columns, dtype]
        if not free:
            free.append(self.keep(torch.empty(self.capacity, columns, dtype=dtype)))
        whole = free.pop()
        handed_out = whole[:]
        weakref.finalize(handed_out, free.append, whole)
        return handed_out

    def needs_scratch(self, args: ctypes.Structure, num_bytes: int) -> None:
        """Let `args.scratch` point to this many bytes, which it shares with all other
        operations."""
        if num_bytes > len(self._scratch):
            self._scratch = torch.empty(num_bytes + 64, dtype=torch.uint8)
        self._scratch_users.append(args)

    def part(self) -> Program:
        """The operations since the last part. It can be run once the rest is recorded, too."""
        part = Program(self._args, [self._buffers])
        self._args = []
        return part

    def finish(self) -> Program:
        """The operations since the last part, or all."""
        for args in self._scratch_users:
            args.scratch = -(-self._scratch.data_ptr() // 64) * 64
        return Program(self._args, [self._buffers, self._scratch])

"""Programs: operations recorded once, run at every step with one call.

Recording computes nothing: it stores the arguments of operations, with the addresses of buffers
that have room for `capacity` tokens. A step then runs these operations on its own number of tokens.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.ops.cpp.abi import KIND_OF, Op, StepArgs
from weft.ops.cpp.library import Library


class Program:
    """A list of operations, and the memory that their addresses point to."""

    def __init__(self, args: Sequence[ctypes.Structure], keep: Sequence[object]) -> None:
        self.args = args
        self._keep = keep
        self._ops = (Op * len(args))(
            *(Op(KIND_OF[type(one)], ctypes.addressof(one)) for one in args)
        )
        self.address = ctypes.addressof(self._ops)  # valid as long as this object

    def run(self, library: Library, step: StepArgs) -> None:
        """Raises MemoryError."""
        library.run(self.address, len(self.args), step)

    def run_part(self, library: Library, step: StepArgs, begin: int, end: int) -> None:
        """Run the operations begin..end-1. Raises MemoryError."""
        address = self.address + begin * ctypes.sizeof(Op)
        library.run(address, end - begin, step)

    def then(self, *args: ctypes.Structure) -> Program:
        """A program with the operations of this one, followed by those of `args`."""
        return Program([*self.args, *args], [self])


class HostCall(NamedTuple):
    """A call on the host between two operations of a program; `do` gets the number of tokens."""

    next_op: int  # index of the operation that follows
    do: Callable[[int], None]


class InterruptedProgram(Program):
    """A program with calls of the host between its operations."""

    def __init__(self, program: Program, calls: Sequence[HostCall]) -> None:
        super().__init__(program.args, [program])
        self._calls = calls

    def run(self, library: Library, step: StepArgs) -> None:
        begin = 0
        for call in self._calls:
            self.run_part(library, step, begin, call.next_op)
            call.do(step.num_tokens)
            begin = call.next_op
        self.run_part(library, step, begin, len(self.args))


class ProgramRecorder:
    """Collects operations and allocates buffers. A buffer is reused when no Python object refers to
    its tensor any more: operations run in the order of recording, and all operations that read it
    have been recorded by then."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._args: list[ctypes.Structure] = []
        self._calls: list[HostCall] = []
        self._buffers: list[Tensor] = []
        # Free buffers, by number of columns and type.
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._scratch_users: list[ctypes.Structure] = []

    @property
    def num_ops(self) -> int:
        """Number of recorded operations since the last part."""
        return len(self._args)

    def add(self, args: ctypes.Structure) -> None:
        self._args.append(args)

    def call(self, do: Callable[[int], None]) -> None:
        """Call a function of the host between two operations, with the number of tokens. Views of
        buffers that it needs must not be the tensors of `buffer`, which would not be reused."""
        self._calls.append(HostCall(len(self._args), do))

    def keep(self, tensor: Tensor) -> Tensor:
        """Keep the tensor alive as long as the program. Returns it."""
        self._buffers.append(tensor)
        return tensor

    def buffer(self, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor [capacity, columns]. It belongs to the caller as long as the caller holds it."""
        free = self._free[columns, dtype]
        if not free:
            free.append(self.keep(torch.empty(self.capacity, columns, dtype=dtype)))
        memory = free.pop()
        handed_out = memory[:]
        weakref.finalize(handed_out, free.append, memory)
        return handed_out

    def needs_scratch(self, args: ctypes.Structure, num_bytes: int) -> None:
        """Request that `args.scratch` points to `num_bytes` bytes. All operations share them."""
        if num_bytes > len(self._scratch):
            self._scratch = torch.empty(num_bytes + 64, dtype=torch.uint8)
        self._scratch_users.append(args)

    def part(self) -> Program:
        """The operations since the last part, as a program. It may be run after `finish`."""
        assert not self._calls, "only a program in one piece calls the host"
        part = Program(self._args, [self._buffers])
        self._args = []
        return part

    def finish(self) -> Program:
        """The operations since the last part, or all. Ends the recording."""
        for args in self._scratch_users:
            args.scratch = -(-self._scratch.data_ptr() // 64) * 64
        program = Program(self._args, [self._buffers, self._scratch])
        return InterruptedProgram(program, self._calls) if self._calls else program

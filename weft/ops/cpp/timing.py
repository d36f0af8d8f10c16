"""Names and times of the operations of programs, while a profile is recorded. The kernels write the
times."""

from __future__ import annotations

import ctypes
import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.ops.cpp.abi import (
    Epilogue,
    LinearArgs,
    Op,
    OpKind,
    PackedWeight,
)

STEP = "weft::step"  # a call of the library that computes a whole step
Programs = tuple[tuple[int, int], ...]  # address and number of operations of each


class Span(NamedTuple):
    """Nanoseconds of the monotonic clock."""

    name: str
    began_ns: int
    took_ns: int


class Call(NamedTuple):
    """One call of the library."""

    names: list[list[str]]  # of the operations of each of its programs
    # For each program: when each of its operations began, and when the last one ended, in ns; 0: it
    # did not run.
    times: NDArray[np.int64]
    is_step: bool
    began_ns: int


class Timings:
    """Keeps the times of all calls. Costs 2 µs per operation that it has not seen before, outside
    of the measured times."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._ends_ns: list[int] = []
        self._names: dict[bytes, list[str]] = {}  # by the bytes of a program

    def begin(self, programs: Programs, *, is_step: bool = False) -> int:
        """Begin a call of the library that runs these programs. Returns the address to which the
        library writes the times."""
        times = np.zeros(sum(num + 1 for _, num in programs), dtype=np.int64)
        names = [self._names_of(address, num) for address, num in programs]
        self._calls.append(
            Call(
                names,
                times,
                is_step,
                time.monotonic_ns(),
            )
        )
        return times.ctypes.data

    def end(self) -> None:
        """End the call."""
        self._ends_ns.append(time.monotonic_ns())

    def spans(self) -> list[Span]:
        """Every operation that ran, and the whole steps around them."""
        found = []
        for call, end_ns in zip(self._calls, self._ends_ns, strict=True):
            if call.is_step:
                found.append(Span(STEP, call.began_ns, end_ns - call.began_ns))
            times = call.times.tolist()
            for names in call.names:
                own = times[: len(names) + 1]
                times = times[len(names) + 1 :]
                if own[0]:
                    ends = own[1:]
                    found += [
                        Span(name, at, end - at)
                        for name, at, end in zip(names, own, ends, strict=False)
                        if end  # 0: a step ended early, because nothing is sampled
                    ]
        return found

    def _names_of(self, address: int, num_ops: int) -> list[str]:
        ops_bytes = ctypes.string_at(address, num_ops * ctypes.sizeof(Op))
        names = self._names.get(ops_bytes)
        if names is None:
            ops = (Op * num_ops).from_address(address)
            names = self._names[ops_bytes] = [name_of(op) for op in ops]
        return names


def name_of(op: Op) -> str:
    """The name of an operation in a profile. The names of products contain their shape, to
    distinguish the layers."""
    kind = OpKind(op.kind)
    name = f"weft::{kind.name.lower()}"
    if kind is not OpKind.LINEAR:
        return name
    args = LinearArgs.from_address(op.args)
    weight = PackedWeight.from_address(args.weight)
    norm = " norm" if args.norm_weight else ""
    return f"{name}{norm} {weight.in_size}x{weight.out_size} {Epilogue(args.epilogue).name.lower()}"

"""The handover between stages as operations of a program, so that a step stays one call of the
library. `../stages.py` is the specification.

The library has one operation that calls a Python function with a tensor, to read or to fill it:
the sum over ranks without shared memory (`sharded.py`). The handover uses this operation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from weft.ops.cpp import abi
from weft.ops.cpp.ops import CppOps
from weft.ops.cpp.sharded import RankLink, floats_at
from weft.ops.fusion import Value
from weft.ops.fusion import activation as activation_of
from weft.ops.sharding import RankLost, RankPlace
from weft.ops.stages import Pipe


class CppHandover:
    """The `Handover` of programs."""

    def __init__(self, ops: CppOps, pipe: Pipe, timeout_s: float) -> None:
        self._ops = ops
        self._taking = _link(pipe.take, timeout_s)
        self._giving = _link(pipe.give, timeout_s)

    def take(self, num_tokens: int, size: int) -> Tensor:
        """`Handover.take`, recorded once for steps of any size: each step has its own number of
        tokens."""
        x = self._ops.recorder.buffer(size)
        self._call(self._taking, x)
        return activation_of(Value(x))

    def give(self, x: Tensor) -> Tensor:
        x = self._ops.computed(x)
        self._call(self._giving, x)
        return x

    def _call(self, link: RankLink, x: Tensor) -> None:
        assert x.stride(0) == x.shape[1], "rows stand one behind the other"
        args = abi.SumRanksArgs(
            ranks=link.address,
            x=x.data_ptr(),
            columns=x.shape[1],
            scale=1.0,
        )
        self._ops.recorder.add(args)


def _link(do: Callable[[Tensor], None], timeout_s: float) -> RankLink:
    link = RankLink(RankPlace(0, 1), timeout_s)
    link.struct.call = abi.RankCall(partial(_called, do))
    return link


def _called(do: Callable[[Tensor], None], what: int, data: int, num: int, out: int | None) -> int:
    try:
        do(floats_at(data, num))
    except RankLost:
        return 1
    return 0

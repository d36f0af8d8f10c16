"""Matrix products with weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from weft.models.layers.weight import Weight, Weights
from weft.ops.codes import CodeFormat, Codes
from weft.ops.protocol import Matrix, Ops

GATE_UP = ("gate", "up")


class Projections:
    """The weights of several projections of the same input, kept as one matrix: so x is read once,
    and one kernel is called.

    `parts` maps the name of each projection in the checkpoint to its output size.
    """

    def __init__(
        self,
        in_size: int,
        parts: Mapping[str, int],
        bias: bool,
        ops: Ops,
        *,
        gated: bool = False,
    ) -> None:
        self.names = tuple(parts)
        self.in_size = in_size
        self.bias = bias
        sizes = tuple(parts.values())
        self.matrix: Matrix = ops.matrix(
            in_size,
            sizes,
            bias=bias,
            gated=gated,
        )

    def weights(self, prefix: str) -> Weights:
        for part, (name, size) in enumerate(zip(self.names, self.matrix.sizes, strict=True)):
            yield Weight(
                name=f"{prefix}.{name}.weight",
                shape=(size, self.in_size),
                put=partial(self.matrix.put, part),
                get=partial(self.matrix.get, part),
                keep_as=partial(self.matrix.keep_as, part),
                put_codes=partial(self.matrix.put_codes, part),
            )
            if self.bias:
                yield _bias(f"{prefix}.{name}.bias", self.matrix, part)


class Linear(Projections):
    """W x + b for each of the projections."""

    def __init__(
        self,
        in_size: int,
        parts: Mapping[str, int],
        bias: bool,
        ops: Ops,
    ) -> None:
        super().__init__(in_size, parts, bias, ops)
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_size] -> [T, sum of sizes]"""
        return self._ops.linear(x, self.matrix)


class GatedLinear(Projections):
    """activation(gate) * up, for two projections of size `size`. `names` are those of gate and up,
    or the one of a tensor that holds both."""

    def __init__(
        self,
        in_size: int,
        names: tuple[str, ...],
        size: int,
        bias: bool,
        ops: Ops,
        *,
        activation: str = "silu",
    ) -> None:
        # Two parts also where a checkpoint has one tensor: the kernel reads gate and up of the same
        # output together, so the matrix has to know which is which.
        super().__init__(
            in_size,
            dict.fromkeys(GATE_UP, size),
            bias,
            ops,
            gated=True,
        )
        self.names = names
        self._ops = ops
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_size] -> [T, size]"""
        return self._ops.gated(x, self.matrix, self._activation)

    def weights(self, prefix: str) -> Weights:
        if len(self.names) > 1:
            yield from super().weights(prefix)
            return
        assert not self.bias, "gate and up in one tensor have no bias"
        yield _stacked(f"{prefix}.{self.names[0]}.weight", self.matrix, self.in_size)


def _stacked(name: str, matrix: Matrix, in_size: int) -> Weight:
    """One tensor that holds all parts of a matrix, one below the other."""
    begins = [sum(matrix.sizes[:part]) for part in range(len(matrix.sizes))]

    def pieces(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The part, and its first and last row, of each part that has some of these rows."""
        for part, (begin, size) in enumerate(zip(begins, matrix.sizes, strict=True)):
            first = max(start - begin, 0)
            last = min(stop - begin, size)
            if first < last:
                yield part, first, last

    def here(
        part: int,
        first: int,
        last: int,
        start: int,
    ) -> slice:
        """Where these rows of a part stand in content that begins at row `start`."""
        begin = begins[part] - start
        return slice(begin + first, begin + last)

    def put(
        content: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        # A piece of the tensor may end in the midst of a part, or hold rows of two.
        for part, first, last in pieces(start, start + len(content)):
            rows = here(part, first, last, start)
            matrix.put(
                part,
                content[rows],
                first,
                None if scales is None else scales[rows],
            )

    def get(start: int = 0, stop: int | None = None) -> Tensor:
        stop = sum(matrix.sizes) if stop is None else stop
        found = [matrix.get(part, first, last) for part, first, last in pieces(start, stop)]
        return torch.cat(found)

    def keep_as(format: CodeFormat) -> None:
        for part in range(len(matrix.sizes)):
            matrix.keep_as(part, format)

    def put_codes(codes: Codes, start: int = 0) -> None:
        for part, first, last in pieces(start, start + len(codes.values)):
            matrix.put_codes(part, codes.of(here(part, first, last, start)), first)

    return Weight(
        name,
        (sum(matrix.sizes), in_size),
        put,
        get,
        keep_as,
        put_codes,
    )


def _bias(
    name: str,
    matrix: Matrix,
    part: int,
) -> Weight:
    """A bias is read and written as a whole."""

    def put(
        content: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        # Checkpoints quantise matrices only, and a loader cuts only matrices into pieces.
        assert start == 0
        assert scales is None
        matrix.put_bias(part, content)

    def get(start: int = 0, stop: int | None = None) -> Tensor:
        return matrix.get_bias(part)[start:stop]

    return Weight(
        name,
        (matrix.sizes[part],),
        put,
        get,
    )

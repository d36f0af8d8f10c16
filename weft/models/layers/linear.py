"""Matrix products with weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from weft.models.layers.weight import Weight, Weights
from weft.ops.protocol import Matrix, Ops


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
    """silu(gate) * up, for the two projections `gate` and `up` of size `size`."""

    def __init__(
        self,
        in_size: int,
        gate: str,
        up: str,
        size: int,
        bias: bool,
        ops: Ops,
    ) -> None:
        super().__init__(
            in_size,
            {gate: size, up: size},
            bias,
            ops,
            gated=True,
        )
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_size] -> [T, size]"""
        return self._ops.gated(x, self.matrix)


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

"""Matrix products with weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from weft.models.layers.weight import Weight, Weights
from weft.ops.protocol import Matrix, Norm, Ops


class Projections:
    """The weights of several projections of the same input, kept as one matrix, so that reading x and calling the
    kernel is paid once. `parts` maps the name of each projection in the checkpoint to its output size."""

    def __init__(
        self, in_size: int, parts: Mapping[str, int], bias: bool, ops: Ops, *, gated: bool = False
    ) -> None:
        self.names = tuple(parts)
        self.in_size = in_size
        self.bias = bias
        self.matrix: Matrix = ops.matrix(in_size, tuple(parts.values()), bias=bias, gated=gated)

    def weights(self, prefix: str) -> Weights:
        for part, (name, size) in enumerate(zip(self.names, self.matrix.sizes, strict=True)):
            put, get = partial(self.matrix.put, part), partial(self.matrix.get, part)
            yield Weight(f"{prefix}.{name}.weight", (size, self.in_size), put, get)
            if self.bias:
                yield _bias(f"{prefix}.{name}.bias", self.matrix, part)


class Linear(Projections):
    """W x + b for each of the projections."""

    def __init__(self, in_size: int, parts: Mapping[str, int], bias: bool, ops: Ops) -> None:
        super().__init__(in_size, parts, bias, ops)
        self._ops = ops

    def __call__(self, x: Tensor, *, norm: Norm | None = None, add: Tensor | None = None) -> Tensor:
        """(add +) W norm(x) + b: [T, in_size] -> [T, sum of sizes]"""
        return self._ops.linear(x, self.matrix, norm=norm, add=add)


class GatedLinear(Projections):
    """silu(gate) * up, for the two projections `gate` and `up` of size `size`."""

    def __init__(self, in_size: int, gate: str, up: str, size: int, bias: bool, ops: Ops) -> None:
        super().__init__(in_size, {gate: size, up: size}, bias, ops, gated=True)
        self._ops = ops

    def __call__(self, x: Tensor, *, norm: Norm | None = None) -> Tensor:
        """[T, in_size] -> [T, size]"""
        return self._ops.gated(x, self.matrix, norm=norm)


def _bias(name: str, matrix: Matrix, part: int) -> Weight:
    """A bias is read and written whole."""

    def put(content: Tensor, start: int = 0, scales: Tensor | None = None) -> None:
        assert start == 0
        assert scales is None
        matrix.put_bias(part, content)

    def get(start: int = 0, stop: int | None = None) -> Tensor:
        return matrix.get_bias(part)[start:stop]

    return Weight(name, (matrix.sizes[part],), put, get)

"""Matrix products whose inputs and outputs may have limits, which a checkpoint has."""

from __future__ import annotations

from torch import Tensor

from weft.config.vision.gemma4 import LIMITS
from weft.models.layers.linear import Linear
from weft.models.layers.weight import Weight, Weights
from weft.ops.encoder import EncoderOps


class LimitedLinear:
    """W x, with limits of the numbers of x and of those of the result."""

    def __init__(
        self,
        in_size: int,
        name: str,
        size: int,
        ops: EncoderOps,
    ) -> None:
        self._ops = ops
        self._name = name
        self._in_size = in_size
        self._size = size
        self.linear = Linear(
            in_size,
            {"linear": size},
            False,
            ops,
        )
        self.limits = ops.vector(len(LIMITS), exact=True)

    def __call__(
        self,
        x: Tensor,
        activation: str = "",
    ) -> Tensor:
        """activation(product): [T, in_size] -> [T, size]"""
        x = self._ops.computed(x)
        out = self._ops.space(x, self._size)
        self.into(
            x,
            out,
            activation,
        )
        return out

    def into(
        self,
        x: Tensor,
        out: Tensor,
        activation: str = "",
    ) -> None:
        of_input, of_output = self.limits.chunk(2)
        limited = self._ops.space(x, self._in_size)
        self._ops.limit(
            x,
            of_input,
            limited,
        )
        self._ops.linear_into(
            limited,
            self.linear.matrix,
            out,
        )
        self._ops.limit(
            out,
            of_output,
            out,
            activation,
        )

    def weights(self, prefix: str) -> Weights:
        yield from self.linear.weights(f"{prefix}.{self._name}")
        for index, name in enumerate(LIMITS):
            yield number_weight(f"{prefix}.{self._name}.{name}", self.limits[index])


def number_weight(name: str, value: Tensor) -> Weight:
    """A tensor without dimensions."""

    def put(
        content: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        value.copy_(content)

    def get(start: int = 0, stop: int | None = None) -> Tensor:
        return value.clone()

    return Weight(
        name,
        (),
        put,
        get,
    )


class PlainLinear:
    """The same as `LimitedLinear`, without limits."""

    def __init__(
        self,
        in_size: int,
        name: str,
        size: int,
        ops: EncoderOps,
    ) -> None:
        self._ops = ops
        self._inner = Linear(
            in_size,
            {f"{name}.linear": size},
            False,
            ops,
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self._inner(x)

    def into(
        self,
        x: Tensor,
        out: Tensor,
    ) -> None:
        self._ops.linear_into(x, self._inner.matrix, out)

    def weights(self, prefix: str) -> Weights:
        yield from self._inner.weights(prefix)


def product(
    name: str,
    in_size: int,
    size: int,
    ops: EncoderOps,
    *,
    is_limited: bool,
) -> LimitedLinear | PlainLinear:
    kind = LimitedLinear if is_limited else PlainLinear
    return kind(
        in_size,
        name,
        size,
        ops,
    )

"""Fuses norms and sums into matrix products, although models write them separately.

A model says  x = x + down(up(norm(x))).  Kernels compute a norm while they read the input of a
product, and a sum while they write its output. So norms and products are evaluated lazily, when
their result is used:

    h = norm(x)     Normed: nothing is computed
    y = W h         Product: nothing is computed
    x = x + y       one operation: x += W norm(x)

In the same way x + s * (W h) and x + s * norm(y) are one operation each.

Models get a `Value`, `Normed` or `Product` where their types say Tensor. A sum overwrites its left
operand. A later read of that operand fails an assertion when the model runs or its program is
recorded; so no model computes with overwritten memory. Knows no kernel.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, cast

from torch import Tensor

from weft.ops.protocol import Norm


class FusedProduct(Protocol):
    def __call__(
        self,
        x: Tensor,
        norm: Norm | None,
        add: Tensor | None,
        scale: float,
    ) -> Tensor:
        """W norm(x) + bias; or add + scale (W norm(x) + bias), in the memory of `add`."""
        ...


class FusedNorm(Protocol):
    def __call__(
        self,
        x: Tensor,
        norm: Norm,
        add: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """norm(x); or add + scale norm(x), in the memory of `add`."""
        ...


class Value:
    """An activation that has been computed."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._is_overwritten = False

    @property
    def tensor(self) -> Tensor:
        assert not self._is_overwritten, "this activation was overwritten by a sum"
        return self._tensor

    def __add__(self, term: Product | ProductSum | Normed) -> Value:
        total = term.added_to(self.tensor)
        self._is_overwritten = True
        return Value(total)


class Normed:
    """norm(x), computed when it is added to an activation or read by anything but a product. A sum
    multiplies it by `scale`."""

    def __init__(
        self,
        x: Activation,
        norm: Norm,
        compute: FusedNorm,
        scale: float = 1.0,
    ) -> None:
        self.x = x
        self.norm = norm
        self._compute = compute
        self._scale = scale
        self._tensor: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        assert not self.is_scaled, "a norm that has a scale can only be added"
        if self._tensor is None:
            self._tensor = self._compute(tensor_of(self.x), self.norm)
        return self._tensor

    @property
    def is_scaled(self) -> bool:
        return self._scale != 1

    def __rmul__(self, scale: float) -> Normed:
        return Normed(self.x, self.norm, self._compute, self._scale * scale)

    def added_to(self, total: Tensor) -> Tensor:
        """Add scale norm(x) to `total` in place."""
        return self._compute(tensor_of(self.x), self.norm, total, self._scale)

    def __radd__(self, tensor: Tensor) -> Value:
        return Value(self.added_to(tensor))


class Product:
    """W x + bias, computed when it is read or added to another activation. A sum multiplies it by
    `scale`."""

    def __init__(
        self,
        x: Activation,
        compute: FusedProduct,
        scale: float = 1.0,
    ) -> None:
        self._x = x
        self._compute = compute
        self._scale = scale
        self._tensor: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        assert self._scale == 1, "a product that has a scale can only be added"
        if self._tensor is None:
            source = source_of(self._x)
            self._tensor = self._compute(source.x, source.norm, None, 1.0)
        return self._tensor

    def __rmul__(self, scale: float) -> Product:
        return Product(self._x, self._compute, self._scale * scale)

    def added_to(self, total: Tensor) -> Tensor:
        """Add scale (W x + bias) to `total` in place."""
        source = source_of(self._x)
        return self._compute(source.x, source.norm, total, self._scale)

    def __radd__(self, tensor: Tensor) -> Value:
        return Value(self.added_to(tensor))

    def __add__(self, other: Product) -> ProductSum:
        return ProductSum((self, other))


class ProductSum:
    """The sum of products, each computed when it is read or added to another activation."""

    def __init__(self, terms: tuple[Product, ...]) -> None:
        self._terms = terms
        self._tensor: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        if self._tensor is None:
            first, *others = self._terms
            self._tensor = first.tensor
            for term in others:
                term.added_to(self._tensor)
        return self._tensor

    def __rmul__(self, scale: float) -> ProductSum:
        return ProductSum(tuple(scale * term for term in self._terms))

    def added_to(self, total: Tensor) -> Tensor:
        """Add all products to `total` in place, one after the other."""
        for term in self._terms:
            term.added_to(total)
        return total

    def __radd__(self, tensor: Tensor) -> Value:
        return Value(self.added_to(tensor))


Activation = Tensor | Value | Normed | Product | ProductSum


def activation(x: Value | Normed | Product) -> Tensor:
    """The activation, typed as the Tensor that models and `Ops` expect."""
    return cast(Tensor, x)


class Source(NamedTuple):
    """The input of a product: norm(x), or x."""

    x: Tensor
    norm: Norm | None


def source_of(x: Activation) -> Source:
    """The input of a fused product: the norm of a `Normed` is left to the product."""
    if isinstance(x, Normed):
        assert not x.is_scaled, "a norm that has a scale can only be added"
        return Source(tensor_of(x.x), x.norm)
    return Source(tensor_of(x), None)


def tensor_of(x: Activation) -> Tensor:
    """The activation as a tensor. Computes it unless that has been done."""
    if isinstance(x, Tensor):
        return x
    return x.tensor

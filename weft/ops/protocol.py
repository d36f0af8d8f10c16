"""What models are made of: the few functions that read weights, on one kind of device.

A model is written against `Ops` and does not know how weights are kept or which device computes.
`plain.py` is the specification in torch, on any device; `cpp/ops.py` records programs for the CPU
kernels, `triton/ops.py` launches kernels on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from weft.ops.codes import CodeFormat, Codes

ROW_STEP = 64  # content of a matrix comes in pieces of this many rows, or multiples of it


class Norm(NamedTuple):
    """RMS normalisation: x / rms(x) * weight, in float32. Source: arXiv:1910.07467."""

    weight: Tensor  # [H]
    eps: float


class LayerNorm(NamedTuple):
    """(x - mean(x)) / deviation(x) * weight + bias. Source: arXiv:1607.06450."""

    weight: Tensor  # [H]
    bias: Tensor  # [H]
    eps: float


class Matrix(Protocol):
    """A weight W [out, in] with its bias, made of parts [sizes[i], in], one below the other."""

    sizes: tuple[int, ...]

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All tensors in which it is kept."""
        ...

    def put(
        self,
        part: int,
        rows: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        """Take the rows [n, in] of a part from row `start` on, a multiple of ROW_STEP.

        They have any float type; or, with float32 `scales` [n], eight bits that are to be
        multiplied by these: int8 or float8_e4m3fn. The matrix may keep them in fewer bits. Its
        tensors stay at their addresses.
        """
        ...

    def keep_as(self, part: int, format: CodeFormat) -> None:
        """Before any content comes: that of this part will come as codes of this format.

        Once all parts have said so, the matrix may decide to keep such codes as they are, unless
        the user wants another format. Its tensors move then; later content does not move them.
        """
        ...

    def put_codes(self, part: int, codes: Codes, start: int = 0) -> None:
        """Take rows of a part as codes, from row `start` on, a multiple of ROW_STEP.

        What the matrix keeps are these weights exactly if it keeps this format, and otherwise
        what `put` makes of them.
        """
        ...

    def get(
        self,
        part: int,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        """A copy of rows of a part as they are kept, [n, in]; `start` is a multiple of
        ROW_STEP."""
        ...

    def put_bias(self, part: int, values: Tensor) -> None: ...

    def get_bias(self, part: int) -> Tensor: ...


class Ops(Protocol):
    """Activations are [T, size] in the type that suits the device. A function's output may live
    only until the end of the step.

    A model adds with `x + s * linear(...)` or `x + s * norm(...)`, or without the factor, which may
    overwrite x. Norms and sums may be computed as part of the products beside them (`fusion.py`),
    so an activation is a tensor for certain only behind `computed`; the functions here take it
    either way.
    """

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors in which weights are kept, once they have their content."""
        ...

    def vector(self, size: int, *, exact: bool = False) -> Tensor:
        """A weight with one dimension, without content yet; `exact`: in float32 for certain."""
        ...

    def matrix(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        *,
        bias: bool = False,
        gated: bool = False,
        precise: bool = False,
    ) -> Matrix:
        """A weight without content yet.

        `gated`: for the function `gated`, with two parts of one size. `precise`: embeddings and
        heads, which suffer most from few bits, and get at least eight.
        """
        ...

    def embed(
        self,
        tokens: Tensor,
        table: Matrix,
        vectors: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """tokens [T] -> rows of the table times `scale`, [T, in]; for a token below 0, row
        -1 - token of `vectors` [.., in], as it is.

        `vectors` are float32, and None if no token is below 0.
        """
        ...

    def norm(self, x: Tensor, norm: Norm) -> Tensor: ...

    def norm_in_place(self, x: Tensor, norm: Norm) -> None:
        """x, a tensor or a slice of its columns, becomes norm(x)."""
        ...

    def layer_norm(self, x: Tensor, norm: LayerNorm) -> Tensor:
        """[T, H] -> [T, H], in float32 inside; never part of a product"""
        ...

    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        """W x + bias: [T, in] -> [T, out]"""
        ...

    def gated(self, x: Tensor, weight: Matrix, activation: str = "silu") -> Tensor:
        """activation(G x) * (U x), G and U the parts of the weight: [T, in] -> [T, out / 2]; the
        activation is one of `GATES`"""
        ...

    def activated(
        self,
        x: Tensor,
        weight: Matrix,
        activation: str,
    ) -> Tensor:
        """activation(W x + bias): [T, in] -> [T, out]; the activation is one of `ACTIVATIONS`"""
        ...

    def logits(
        self,
        x: Tensor,
        weight: Matrix,
        scale: float = 1.0,
        cap: float = 0.0,
    ) -> Tensor:
        """y = scale W x in float32, or cap tanh(y / cap) unless `cap` is 0; a tensor that the
        caller may overwrite: [S, in] -> [S, out]"""
        ...

    def computed(self, x: Tensor) -> Tensor:
        """The activation as a tensor: attention reads it, or the model ends with it."""
        ...

"""What models are made of: the few functions that read weights, on one kind of device.

A model is written against `Ops` and does not know how weights are kept or which device computes.
`plain.py` is the specification in torch, on any device; `cpp/ops.py` records programs for the CPU
kernels, `triton/ops.py` launches kernels on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from torch import Tensor

from weft.ops.codes import CodeFormat, Codes
from weft.ops.routing import Choice, Routed

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


class Router(NamedTuple):
    """Chooses experts by the logits W x + bias, in float32."""

    weight: Matrix  # [experts, H], exact
    choice: Choice
    choice_bias: Tensor | None  # [experts] float32, exact
    layer: int  # under which what it chose is kept


class Experts(NamedTuple):
    """down(activation(gate x) * up x) for each of E experts, each of which has parts of its own in
    both matrices (`Ops.expert_matrix`)."""

    gate_up: Matrix  # parts: gate and up of the first expert, of the second ..
    down: Matrix  # parts: one for each expert
    activation: str  # one of `GATES`


class Divided(Enum):
    OUTPUTS = "outputs"
    INPUTS = "inputs"


class Shard(NamedTuple):
    """How a matrix is divided between processes, where several hold a model (`sharding.py`)."""

    divided: Divided
    unit: int = 1  # outputs that stay together: those of a head


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

    def keep_as(self, part: int, format: CodeFormat, order: Tensor | None = None) -> None:
        """Before any content comes: that of this part will come as codes of this format, with its
        inputs in this order (`Codes.order`).

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
        shard: Shard | None = None,
    ) -> Matrix:
        """A weight without content yet.

        `gated`: for the function `gated`, with two parts of one size. `precise`: embeddings and
        heads, which suffer most from few bits, and get at least eight. `shard`: how it is divided
        where several processes hold the model; None: each has all of it.
        """
        ...

    def exact_matrix(self, in_size: int, size: int, *, bias: bool = False) -> Matrix:
        """A weight for `route`, in float32 for certain, without content yet."""
        ...

    def expert_matrix(
        self,
        num_experts: int,
        in_size: int,
        sizes: tuple[int, ...],
        *,
        bias: bool = False,
        gated: bool = False,
        shard: Shard | None = None,
    ) -> Matrix:
        """Weights without content yet that all have parts of these sizes: one for each expert, one
        below the other. Part p of expert e is part e len(sizes) + p. `shard`: how each expert is
        divided; no process lacks one."""
        ...

    def of_heads(self, values: Tensor) -> Tensor:
        """Of a vector with one number for each head, those of the heads that are computed here: a
        part of it, in the same memory, where several processes hold the model."""
        ...

    def embed(
        self,
        tokens: Tensor,
        table: Matrix,
        vectors: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """tokens [T] -> rows of the table times `scale`, [T, in]; for a token below 0, row
        -1 - token of `vectors` [.., in or more], as it is.

        `vectors` are float32, and None if no token is below 0.
        """
        ...

    def add_vectors(self, x: Tensor, tokens: Tensor, vectors: Tensor | None, part: int) -> Tensor:
        """Add to x [T, H] (which may be overwritten), for each of the tokens [T] below 0, the
        numbers part H .. (part + 1) H - 1 of its row of `vectors`, as of `embed`; those of part 0
        stand for the token. Rows that are shorter have nothing to add."""
        ...

    def norm(self, x: Tensor, norm: Norm) -> Tensor: ...

    def norm_in_place(self, x: Tensor, norm: Norm) -> None:
        """x, a tensor or a slice of its columns, becomes norm(x)."""
        ...

    def space(self, x: Tensor, size: int) -> Tensor:
        """[T, size] without content, for what follows from x [T, ..]."""
        ...

    def linear_into(self, x: Tensor, weight: Matrix, out: Tensor) -> None:
        """`out`, a tensor or a slice of its columns, becomes W x + bias: x [T, in], which may be a
        slice, too -> [T, out]"""
        ...

    def copy(self, x: Tensor, out: Tensor) -> None:
        """`out` becomes x: both are columns of tensors [T, ..], n pieces of one size: [T, n,
        size]"""
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

    def route(self, x: Tensor, router: Router) -> Routed:
        """The experts of each token of x [T, in], and how much each counts."""
        ...

    def experts(self, x: Tensor, routed: Routed, experts: Experts) -> Tensor:
        """The sum of the outputs of each token's experts, the best first, each times its weight:
        [T, in] -> [T, out]. Experts that no token chose are not read. What a token gets does not
        depend on the others, as far as that holds for `linear`."""
        ...

    def gate_rows(self, y: Tensor, x: Tensor, weight: Tensor) -> None:
        """Each row of y [T, n] becomes sigmoid(weight x) times itself: x [T, in], weight [in]
        float32."""
        ...

    @property
    def chosen(self) -> dict[int, Tensor]:
        """By layer, the experts that `route` chose last: [T or more, k] int32. On a device with
        graphs, those of steps without graphs."""
        ...

    def logits(
        self,
        x: Tensor,
        weight: Matrix,
        scale: float = 1.0,
        cap: float = 0.0,
        places: Tensor | None = None,
    ) -> Tensor:
        """y = scale W x in float32, or cap tanh(y / cap) unless `cap` is 0; a tensor that the
        caller may overwrite: [S, in] -> [S, out]. `places` [S]: which tokens of the step these are;
        None: all of them."""
        ...

    def computed(self, x: Tensor) -> Tensor:
        """The activation as a tensor: attention reads it, or the model ends with it."""
        ...

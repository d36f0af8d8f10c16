"""The operations of models: the few functions that read weights, for one kind of device.

A model is written against `Ops` and does not know how weights are stored or which device computes.
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

ROW_STEP = 64  # the content of a matrix is loaded in multiples of this number of rows


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
    layer: int  # key of its choices in `Ops.chosen`
    expert_scale: Tensor | None = None  # [experts] float32, exact: factors of the weights


class Experts(NamedTuple):
    """down(activation(gate x) * up x) for each of E experts, or without gates down(activation(up
    x)). Each expert has its own parts in both matrices (`Ops.expert_matrix`)."""

    gate_up: Matrix  # parts: gate and up of the first expert, of the second ..; or ups alone
    down: Matrix  # parts: one per expert
    activation: str  # one of `GATES`; without gates, of `ACTIVATIONS`

    @property
    def is_gated(self) -> bool:
        return len(self.gate_up.sizes) > len(self.down.sizes)


class Divided(Enum):
    OUTPUTS = "outputs"
    INPUTS = "inputs"


class Shard(NamedTuple):
    """How a matrix is divided if several processes hold parts of it (`sharding.py`)."""

    divided: Divided
    unit: int = 1  # consecutive outputs that are not divided: those of a head


class LayerRange(NamedTuple):
    """The consecutive layers of a decoder that one process computes."""

    layers: range
    is_first: bool  # whether the embedding comes before them
    is_last: bool  # whether the head follows them


class Matrix(Protocol):
    """A weight W [out, in] with its bias. It consists of parts [sizes[i], in], concatenated along
    the outputs."""

    sizes: tuple[int, ...]

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All tensors that store the matrix."""
        ...

    def put(
        self,
        part: int,
        rows: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        """Load rows [n, in] of a part, from row `start` on, a multiple of ROW_STEP.

        The rows have any float type; or, with float32 `scales` [n], they are int8 or float8_e4m3fn
        values to be multiplied by the scales. The matrix may store them in fewer bits. Its tensors
        keep their addresses.
        """
        ...

    def keep_as(self, part: int, format: CodeFormat, order: Tensor | None = None) -> None:
        """Announce, before any content is loaded, that this part will be loaded as codes of this
        format, with its inputs in this order (`Codes.order`).

        After this call for every part, the matrix may choose to store such codes unchanged, unless
        the user wants another format. Its tensors move then; loading does not move them.
        """
        ...

    def put_codes(self, part: int, codes: Codes, start: int = 0) -> None:
        """Load rows of a part as codes, from row `start` on, a multiple of ROW_STEP.

        A matrix that stores this format keeps the weights exactly; another one converts them as
        `put` does.
        """
        ...

    def get(
        self,
        part: int,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        """A copy of the stored rows of a part, [n, in]; `start` is a multiple of ROW_STEP."""
        ...

    def put_bias(self, part: int, values: Tensor) -> None: ...

    def get_bias(self, part: int) -> Tensor: ...


class StreamRouter(NamedTuple):
    """Makes a few numbers of a vector: tanh(W norm(x)), in float32."""

    norm: Norm
    weight: Matrix  # [num, size], exact


class StreamOps(Protocol):
    """Operations on streams: several versions of a token's hidden state, side by side in a row of
    num times size numbers. Source: arXiv:2301.13310. All get tensors."""

    def open(self, x: Tensor, others: Tensor) -> Tensor:
        """x [T, size] and the other streams [T, (num - 1) size], each with the root mean square of
        x: [T, num size]"""
        ...

    def factors(self, x: Tensor, router: StreamRouter, weight: Matrix) -> Tensor:
        """weight router(x), in float32: x [T, size], `weight` [n, num] exact -> [T, n]"""
        ...

    def predict(self, x: Tensor, factors: Tensor) -> Tensor:
        """Each stream i of x [T, num size] plus the sum over j of factors [T, num num] at i num + j
        times stream j: [T, num size]; x stays as it is."""
        ...

    def correct(self, x: Tensor, y: Tensor, factors: Tensor, active: int) -> None:
        """Add (1 + factors [T, num] at i) times the difference of y [T, size] and stream `active`
        to each stream i of x, which is overwritten."""
        ...

    def add_normed(self, x: Tensor, y: Tensor, norm: Norm) -> None:
        """Add norm(y), y [T, size], to all streams of x but the first; x is overwritten."""
        ...

    def close(self, x: Tensor, others: Tensor) -> Tensor:
        """The mean of x [T, size] and of the other streams [T, (num - 1) size], each with the root
        mean square of x: [T, size]"""
        ...

    def cut_off(self, x: Tensor, deviations: float, activation: str) -> Tensor:
        """activation(max(0, x - mean - deviations deviation)), with the mean and the standard
        deviation of a row of x [T, n], which is overwritten; one of `ACTIVATIONS`."""
        ...


class Ops(Protocol):
    """Activations are [T, size], in the type that suits the device. The output of a function may be
    valid only until the end of the step.

    A model adds with `x + s * linear(...)` or `x + s * norm(...)`, or without the factor s; the sum
    may overwrite x. Norms and sums may be fused into neighbouring products (`fusion.py`), so only
    the result of `computed` is certain to be a tensor; the functions here accept both.
    """

    streams: StreamOps

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that store weights, after the weights have been loaded."""
        ...

    def vector(self, size: int, *, exact: bool = False) -> Tensor:
        """An uninitialised weight of one dimension; `exact`: always in float32."""
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
        """An uninitialised weight.

        `gated`: for the function `gated`, with two parts of equal size. `precise`: for embeddings
        and heads, which lose most accuracy to few bits and get at least eight. `shard`: how the
        weight is divided if several processes hold the model; None: each process has all of it.
        """
        ...

    def exact_matrix(self, in_size: int, size: int, *, bias: bool = False) -> Matrix:
        """An uninitialised weight for `route`, always in float32."""
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
        """Uninitialised weights of all experts, concatenated; each expert has parts of these
        sizes. Part p of expert e is part e * len(sizes) + p. `shard`: how each expert is divided;
        every process has a part of every expert."""
        ...

    def of_heads(self, values: Tensor) -> Tensor:
        """The values of the heads that this process computes, from a vector with one value per
        head. A view of `values`, shorter if several processes hold the model."""
        ...

    def layer_range(self, num_layers: int) -> LayerRange:
        """The layers that this process computes: all, unless processes compute the layers one
        after the other (`stages.py`)."""
        ...

    def take(self, num_tokens: int, size: int) -> Tensor:
        """The output of the layer before these, from the process that computes it:
        [num_tokens, size]."""
        ...

    def give(self, x: Tensor) -> Tensor:
        """Hand x [T, size], the output of the last of these, to the process that computes the next
        layer. Returns x."""
        ...

    def embed(
        self,
        tokens: Tensor,
        table: Matrix,
        vectors: Tensor | None = None,
        scale: float = 1.0,
        unknown_token: int | None = None,
    ) -> Tensor:
        """tokens [T] -> rows of the table times `scale`, [T, in]; for a token below 0, row
        -1 - token of `vectors` [.., in or more], unscaled; or the row of `unknown_token`, if that
        is given.

        `vectors` are float32, and None if no token is below 0.
        """
        ...

    def multiply(self, x: Tensor, by: Tensor) -> Tensor:
        """x [T, n] times `by`, number by number. `by` is [T, n], or a weight [n] or [1]. x may be
        overwritten."""
        ...

    def add_vectors(self, x: Tensor, tokens: Tensor, vectors: Tensor | None, part: int) -> Tensor:
        """x [T, H] plus, for each of the tokens [T] below 0, the values part * H ..
        (part + 1) * H - 1 of the token's row of `vectors` (`embed` uses part 0). Shorter rows add
        nothing. x may be overwritten."""
        ...

    def add_positions(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """x [T, H] plus row `positions` [T] of the table, a float32 weight [n * H]. x may be
        overwritten."""
        ...

    def norm(self, x: Tensor, norm: Norm) -> Tensor: ...

    def norm_overwrites(self, x: Tensor, norm: Norm) -> None:
        """Replace x, a tensor or a slice of columns, by norm(x)."""
        ...

    def space(self, x: Tensor, size: int) -> Tensor:
        """An uninitialised tensor [T, size], for results computed from x [T, ..]."""
        ...

    def linear_into(self, x: Tensor, weight: Matrix, out: Tensor) -> None:
        """Write W x + bias into `out`: x [T, in] -> [T, out]. Both may be slices of columns."""
        ...

    def copy(self, x: Tensor, out: Tensor) -> None:
        """Copy x to `out`. Both are columns of tensors [T, ..], as n pieces of one size:
        [T, n, size]"""
        ...

    def layer_norm(self, x: Tensor, norm: LayerNorm) -> Tensor:
        """[T, H] -> [T, H], computed in float32; never fused into a product"""
        ...

    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        """W x + bias: [T, in] -> [T, out]"""
        ...

    def gated(self, x: Tensor, weight: Matrix, activation: str = "silu") -> Tensor:
        """activation(G x) * (U x), where G and U are the parts of the weight: [T, in] ->
        [T, out / 2]; the activation is one of `GATES`"""
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
        """The experts of each token of x [T, in], and their weights."""
        ...

    def experts(self, x: Tensor, routed: Routed, experts: Experts) -> Tensor:
        """The weighted sum of the outputs of each token's experts, added from the best on:
        [T, in] -> [T, out]. Experts that no token chose are not read. The result of a token does
        not depend on other tokens, as far as that holds for `linear`."""
        ...

    def weighted(self, x: Tensor, routed: Routed) -> tuple[Tensor, Routed]:
        """The rows of x [T, in], each times the weight of its one expert, for experts that get
        weighted inputs; and the same experts with weights of 1. x stays as it is."""
        ...

    def gate_rows(self, y: Tensor, x: Tensor, weight: Tensor) -> None:
        """Multiply each row of y [T, n] by sigmoid(weight x), in place: x [T, in], weight [in]
        float32."""
        ...

    @property
    def chosen(self) -> dict[int, Tensor]:
        """The experts of the last call of `route`, by layer: [T or more, k] int32. On a device with
        graphs, only steps without graphs set them."""
        ...

    def logits(
        self,
        x: Tensor,
        weight: Matrix,
        scale: float = 1.0,
        cap: float = 0.0,
        places: Tensor | None = None,
    ) -> Tensor:
        """y = scale W x in float32, or cap tanh(y / cap) unless `cap` is 0: [S, in] -> [S, out].
        The caller may overwrite the tensor. `places` [S]: the indices of these tokens in the step;
        None: all tokens."""
        ...

    def computed(self, x: Tensor) -> Tensor:
        """The activation as a tensor, for attention or as the output of the model."""
        ...

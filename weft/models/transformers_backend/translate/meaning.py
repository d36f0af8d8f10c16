"""Meanings: values of a graph in terms of `Ops`. Torch computes a value without a meaning, as the
model's code says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from weft.models.layers.weight import RowRun
from weft.models.transformers_backend.attention import AttentionCall
from weft.models.transformers_backend.translate.graph import TracedValue


@dataclass(frozen=True, eq=False)
class Embed:
    """Rows of a table, times `scale` and the table's own scale."""

    table: str
    scale: float = 1.0
    inputs: tuple[TracedValue, ...] = ()


@dataclass(frozen=True, eq=False)
class Projected:
    """W x + bias"""

    matrix: str
    inputs: tuple[TracedValue]  # x


@dataclass(frozen=True, eq=False)
class Group:
    """Matrices of the model that are stored as one; each of their rows belongs to one of its
    parts."""

    sizes: tuple[int, ...]  # of the parts
    runs: dict[str, list[RowRun]]  # by the name of the matrix
    is_gated: bool = False


@dataclass(frozen=True, eq=False)
class Gate:
    """activation(G x) * U x"""

    group: Group
    activation: str
    inputs: tuple[TracedValue]


@dataclass(frozen=True, eq=False)
class Activation:
    """activation(W x + bias)"""

    matrix: str
    activation: str
    inputs: tuple[TracedValue]


@dataclass(frozen=True, eq=False)
class RmsNormed:
    """x / rms(x) * weight"""

    inputs: tuple[TracedValue]
    weight: TracedValue | None  # a constant; None: 1
    size: int
    eps: float


@dataclass(frozen=True, eq=False)
class LayerNormed:
    """(x - mean(x)) / deviation(x) * weight + bias"""

    inputs: tuple[TracedValue]
    weight: TracedValue | None
    bias: TracedValue | None
    size: int
    eps: float


@dataclass(frozen=True, eq=False)
class Sum:
    inputs: tuple[TracedValue, TracedValue]


@dataclass(frozen=True, eq=False)
class Scaled:
    """x times a number"""

    inputs: tuple[TracedValue]
    scale: float


@dataclass(frozen=True, eq=False)
class Capped:
    """Logits: cap tanh(scale W x / cap), or scale W x if the cap is 0"""

    matrix: str
    inputs: tuple[TracedValue]
    scale: float
    cap: float


@dataclass(frozen=True, eq=False)
class HeadRotation:
    """The rotation of heads, by position."""

    cos: Tensor  # [context, size / 2]
    sin: Tensor
    is_side_by_side: bool  # pairs are (2 i, 2 i + 1) instead of (i, i + size / 2)


class HeadNorm(NamedTuple):
    """A norm of queries or keys before their rotation."""

    weight: TracedValue | None
    eps: float
    size: int  # of one head, or of all heads together


@dataclass(frozen=True, eq=False)
class Attend:
    """Attention over pages, on queries, keys and values that are rows of one product."""

    inputs: tuple[TracedValue]  # x of the product
    group: Group
    rotation: HeadRotation | None
    q_norm: HeadNorm | None
    k_norm: HeadNorm | None
    sinks: TracedValue | None
    call: AttentionCall  # without tensors


@dataclass(frozen=True, eq=False)
class AttendTo:
    """Attention over pages, on queries, keys and values that torch computed."""

    inputs: tuple[TracedValue, ...]
    sinks: TracedValue | None
    call: AttentionCall


Meaning = (
    Embed
    | Projected
    | Gate
    | Activation
    | RmsNormed
    | LayerNormed
    | Sum
    | Scaled
    | Capped
    | Attend
    | AttendTo
)

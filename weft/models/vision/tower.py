"""What every encoder of pictures, videos or sounds can do, and what computes it.

A tower cuts its input and sorts its vectors in torch, which is little work. What it multiplies are
parts: functions of rows that are written against `EncoderOps`. A backend runs them, in torch or as
recorded programs.

What takes long is done in pieces: between two of them the device may do other things, so that a
large picture does not keep everybody waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from weft.arrays import IntArray
from weft.models.layers.encoder import BidirectionalAttention
from weft.models.layers.weight import Weights
from weft.ops.elementwise import rotary_angles
from weft.ops.encoder import EncoderOps

# Each `next` does a piece of the work; the last one returns the rows.
Pieces: TypeAlias = Generator[None, None, Tensor]


def at_once(pieces: Pieces) -> Tensor:
    """What they return, without a pause."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            rows: Tensor = end.value
            return rows


class TowerInput(NamedTuple):
    """One picture, tile, stretch of a video, or sound."""

    kind: str  # image, video, audio
    length: int  # vectors that it becomes
    grid: tuple[int, int, int] | None  # how these lie in time, height and width; None: in a line
    values: Tensor  # float32, on the device of the tower, in the shape that the family reads


class Tower(Protocol):
    """An encoder with its projection to the hidden size of the decoder."""

    def encode(self, input: TowerInput) -> Pieces:
        """The vectors of one input, which depend on nothing else. Another one is begun when this
        one has ended, or is given up.

        They return [input.length, (1 + K) * hidden size], floats that are good until the tower or
        its decoder is called again: the first `hidden size` of a vector take the place of the
        token's embedding, each of the K following ones is added behind one of the first K layers
        (deepstack; usually K is 0).

        Raises ValueError for values of another shape than the family's.
        """
        ...

    def weights(self) -> Weights:
        """Every tensor that it wants from a checkpoint, by its name there."""
        ...


class PlaneRotation:
    """Of the pairs of a head, the first half turns by the row of a patch, the second by its
    column."""

    def __init__(
        self, head_dim: int, theta: float, num_places: int, *, alternates: bool = False
    ) -> None:
        """Rows and columns are below `num_places`. `alternates`: columns turn at speeds between
        those of rows, and not at the same."""
        quarter = head_dim // 4
        steps = torch.arange(quarter, dtype=torch.float32) / quarter
        shift = 0.5 / quarter if alternates else 0.0
        inv_freq = 1.0 / theta ** torch.cat((steps, steps + shift))
        # [num_places, head_dim / 2] at each row, and each column
        self.cos, self.sin = rotary_angles(torch.arange(num_places), inv_freq, 1.0)
        # [head_dim / 2] by which line of `TowerAttention.prepare`'s places each pair turns
        self.axes = torch.arange(2).repeat_interleave(quarter)


class TowerAttention(BidirectionalAttention, Protocol):
    """`BidirectionalAttention` of the rows of a part: rows of one stretch see each other."""

    def prepare(self, lens: Sequence[int], places: IntArray | None = None) -> None:
        """Set the lengths of the stretches into which the rows of the next parts are divided.

        `places` [3, T] int32: by which queries and keys are rotated; None: as they were.
        """
        ...


class TowerBackend(Protocol):
    """Computes the parts of one tower on one kind of device."""

    @property
    def ops(self) -> EncoderOps: ...

    @property
    def device(self) -> torch.device:
        """Where rows lie."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows that parts read and write."""
        ...

    def make_attention(
        self, num_heads: int, head_dim: int, rotation: PlaneRotation | None = None
    ) -> TowerAttention:
        """The attention of the tower, which has one: what parts call `forward` of. It rotates
        queries and keys if there is a `rotation`."""
        ...

    def pause(self, x: Tensor, do: Callable[[Tensor], None]) -> None:
        """Within a part: at each of its runs, call do(x) when the rows of x are there. It may run
        other parts, and prepare the attention of the rest of this one."""
        ...

    def run(self, part: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """part(*rows): each [T, n], of any float type and with an n of its own -> [T, m], good
        until the next run.

        `part` is a function that lives as long as the tower, such as a method: it is called once or
        at each run. It may overwrite rows by sums (`Ops`), and ends with `computed`.
        """
        ...

    def run_in_pieces(self, part: Callable[..., Tensor], *rows: Tensor) -> Pieces:
        """As `run`, in pieces that are short where the device is slow. Until they have ended,
        nothing else of the tower is run, but for what the part itself runs at its pauses."""
        ...

"""The interface of all encoders of pictures, videos and sounds, and of the backends that compute
them.

A tower cuts its input and sorts its vectors in torch, which is little work. Its products are in
parts: functions of rows that use `EncoderOps`. A backend runs the parts, in torch or as recorded
programs.

Long work is done in pieces: between two pieces the device may do other work, so that a large
picture does not delay all requests.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from weft.arrays import IntArray
from weft.models.layers.weight import Weights
from weft.ops.elementwise import rotary_angles
from weft.ops.encoder import EncoderOps
from weft.ops.protocol import Norm

# Each `next` does one piece of the work; the last one returns the rows.
Pieces: TypeAlias = Generator[None, None, Tensor]


def at_once(pieces: Pieces) -> Tensor:
    """Run all pieces without a pause. Returns their result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            rows: Tensor = end.value
            return rows


class TowerInput(NamedTuple):
    """One picture, tile, part of a video, or sound."""

    kind: str  # image, video, audio
    length: int  # number of vectors
    grid: tuple[int, int, int] | None  # vectors in time, height and width; None: one dimension
    values: Tensor  # float32, on the tower's device, in the shape of the family

    def plane(self, side: int) -> tuple[int, int]:
        """The rows and columns of vectors of a picture [3, H, W], one for each `side` x `side`
        pixels. Raises ValueError for a picture of another shape."""
        assert self.grid is not None, "these pictures have a grid"
        _, rows, columns = self.grid
        shape = [3, rows * side, columns * side]
        found = list(self.values.shape)
        if found != shape:
            raise ValueError(
                f"a picture of {rows} x {columns} tokens has the shape {found}; this encoder reads "
                f"{shape}"
            )
        return rows, columns


class Tower(Protocol):
    """An encoder with its projection to the hidden size of the decoder."""

    def encode(self, input: TowerInput) -> Pieces:
        """The vectors of one input, which depend on nothing else. The caller begins another input
        only when this one has ended, or was abandoned.

        The pieces return [input.length, (1 + K) * hidden size], floats that are valid until the
        next call of the tower or its decoder. The first `hidden size` values of a vector replace
        the token's embedding; each of the K following parts is added after one of the first K
        layers (deepstack; usually K is 0). For a decoder that attends to the vectors, they are keys
        and values: [keys of the first layer | its values | keys of the second layer | ..].

        Raises ValueError for values of another shape than the family's.
        """
        ...

    def weights(self) -> Weights:
        """Every tensor that the tower needs from a checkpoint, by its name there."""
        ...


class PlaneRotation:
    """Rotates the first half of a head's pairs by the row of a patch, the second half by its
    column."""

    def __init__(
        self,
        head_dim: int,
        theta: float,
        num_places: int,
        *,
        alternates: bool = False,
        side_by_side: bool = False,
    ) -> None:
        """Rows and columns are below `num_places`. `alternates`: the frequencies of columns lie
        between those of rows, instead of being equal. `side_by_side`: pairs are (2 i, 2 i + 1), not
        (i, i + half)."""
        self.side_by_side = side_by_side
        quarter = head_dim // 4
        steps = torch.arange(quarter, dtype=torch.float32) / quarter
        shift = 0.5 / quarter if alternates else 0.0
        inv_freq = 1.0 / theta ** torch.cat((steps, steps + shift))
        # [num_places, head_dim / 2] for each row, and each column
        self.cos, self.sin = rotary_angles(torch.arange(num_places), inv_freq, 1.0)
        # [head_dim / 2] the line of `TowerAttention.prepare`'s places that rotates each pair
        self.axes = torch.arange(2).repeat_interleave(quarter)


class TowerHeads(NamedTuple):
    """The norms of each head before the rotation, and the factor of scores."""

    q_norm: Norm
    k_norm: Norm
    v_norm: Norm
    scale: float


class TowerAttention(Protocol):
    """The attention of the rows of a part: rows attend within their own segment."""

    def prepare(self, lens: Sequence[int], places: IntArray | None = None) -> None:
        """Set the lengths of the segments into which the rows of the next parts are divided.

        `places` [3, T] int32: the positions that rotate queries and keys; None: unchanged.
        """
        ...

    def forward(self, qkv: Tensor, heads: TowerHeads | None = None) -> Tensor:
        """qkv [T, 3 heads D] (may be overwritten) -> [T, heads D]. Without `heads` there are no
        norms, and scores are divided by sqrt(D)."""
        ...


class TowerBackend(Protocol):
    """Computes the parts of one tower on one kind of device."""

    @property
    def ops(self) -> EncoderOps: ...

    @property
    def device(self) -> torch.device:
        """The device of rows."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows that parts read and write."""
        ...

    def make_attention(
        self, num_heads: int, head_dim: int, rotation: PlaneRotation | None = None
    ) -> TowerAttention:
        """The attention of the tower (there is one); parts call its `forward`. It rotates queries
        and keys if `rotation` is given."""
        ...

    def pause(self, x: Tensor, do: Callable[[Tensor], None]) -> None:
        """Within a part: at each run of the part, call do(x) when the rows of x are computed. `do`
        may run other parts, and prepare the attention for the rest of this one."""
        ...

    def run(self, part: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """part(*rows): each [T, n], of any float type and with its own n -> [T, m], valid until the
        next run.

        `part` is a function that lives as long as the tower, such as a method: it is called once,
        or at each run. It may overwrite rows with sums (`Ops`), and ends with `computed`.
        """
        ...

    def run_in_pieces(self, part: Callable[..., Tensor], *rows: Tensor) -> Pieces:
        """Like `run`, in pieces that are short if the device is slow. Until they have ended,
        nothing else of the tower runs, except what the part itself runs at its pauses."""
        ...

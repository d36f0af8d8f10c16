"""The seam of attention: what a step says to the backend, and what a backend promises to the
models.

A backend owns how K and V are stored and read. `ATTENTION_BACKENDS` (`config/engine.py`) names the
class of each; docs/contribute/attention-backend.md adds one for GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch import Tensor

from weft.arrays import IntArray
from weft.models.layers.attention import PagedAttention


class StepSize(NamedTuple):
    """The lengths of the arrays of a step that is laid out for a GPU. All launches depend on these
    numbers alone."""

    num_requests: int  # R
    num_tokens: int  # T
    num_decodes: int  # D, requests with one token
    num_tiles: int  # N, pieces of the queries of the other requests
    num_splits: int  # parts into which the cached tokens of a decoding request are cut

    def holds(self, other: StepSize) -> bool:
        """Whether a step of the other size can be laid out in this one."""
        return all(mine >= theirs for mine, theirs in zip(self[:4], other[:4], strict=True))


class DeviceLayout(NamedTuple):
    """A step as it was laid out on the host, in arrays on the device, and its size.

    While a decode step is captured as a graph, and whenever that graph is replayed, this alone is
    true of the `AttentionBatch`.
    """

    arrays: tuple[Tensor, ...]  # int32, in the order of `gpu/layout.py`'s StepLayout
    size: StepSize


class WindowBatch(NamedTuple):
    """The slots of layers with windows, where they have a pool of their own."""

    slots: Tensor  # [T] int64, for K and V of this step's tokens
    table: Tensor  # [max_rows, context_length] int32; positions outside of windows have no meaning


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The requests of one step. Lengths are on the host, so that a plan needs no device."""

    rows: IntArray  # [R] row of each request in the slot table
    starts: IntArray  # [R] tokens in the cache before this step
    lens: IntArray  # [R] tokens of this step; those of request i begin at sum(lens[:i])
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64, slots for K and V of this step's tokens
    table: Tensor  # [max_rows, context_length] int32, slot of each token, with this step's
    layout: DeviceLayout | None = None  # of the backend's own `tiling`, on a GPU
    window: WindowBatch | None = None  # None: `slots` and `table` are those of all layers
    # [3, T] int32, positions in time, height and width by which tokens are rotated; None: they are
    # `positions`
    rotation: IntArray | None = None
    # [T] int32, position behind the last token that each one sees, rising in a request, at least
    # its own and at most that of the last in the step; None: each sees up to itself
    sees_to: IntArray | None = None

    def seen_by(self, window: int) -> AttentionBatch:
        """The batch with the slots and the table of layers with this window; 0: without one."""
        if self.window is None or not window:
            return self
        return replace(self, slots=self.window.slots, table=self.window.table)


class AttentionBackend(PagedAttention, Protocol):
    """Attention over the KV pool of one model."""

    def prepare(self, batch: AttentionBatch) -> None:
        """Plan attention over `batch`, once for all layers. Calls of `forward` until the next call
        of this belong to that batch."""
        ...

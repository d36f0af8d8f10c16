"""The interface of attention: what a step passes to the backend, and what a backend guarantees to
the models.

A backend decides how K and V are stored and read. `ATTENTION_BACKENDS` (`config/engine.py`) names
the class of each; docs/contribute/attention-backend.md shows how to add one for GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch import Tensor

from weft.arrays import IntArray
from weft.models.layers.attention import PagedAttention


class StepSize(NamedTuple):
    """The lengths of the arrays of a step in the layout for a GPU. All launches depend only on
    these numbers."""

    num_requests: int  # R
    num_tokens: int  # T
    num_decodes: int  # D, requests with one token
    num_tiles: int  # N, pieces of the queries of the other requests
    num_splits: int  # parts into which the cached tokens of a decoding request are divided

    def holds(self, other: StepSize) -> bool:
        """Whether a step of the other size can be laid out in this one."""
        return all(mine >= theirs for mine, theirs in zip(self[:4], other[:4], strict=True))


class DeviceLayout(NamedTuple):
    """The layout of a step, made on the host, in arrays on the device, and its size.

    While a decode step is captured as a graph, and whenever this graph is replayed, only this part
    of the `AttentionBatch` is valid.
    """

    arrays: tuple[Tensor, ...]  # int32, in the order of `gpu/layout.py`'s StepLayout
    size: StepSize


class WindowBatch(NamedTuple):
    """The slots of layers with windows, if they have a pool of their own."""

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
    layout: DeviceLayout | None = None  # for the backend's own `tiling`, on a GPU
    window: WindowBatch | None = None  # None: `slots` and `table` are those of all layers
    # [3, T] int32, positions in time, height and width by which tokens are rotated; None:
    # `positions`
    rotation: IntArray | None = None
    # [T] int32, end (exclusive) of the positions that each token sees, rising within a request, at
    # least its own position + 1 and at most the end of the step; None: each sees up to itself
    sees_to: IntArray | None = None

    def seen_by(self, window: int) -> AttentionBatch:
        """The batch with the slots and the table of layers with this window; 0: without one."""
        if self.window is None or not window:
            return self
        return replace(self, slots=self.window.slots, table=self.window.table)


class AttentionBackend(PagedAttention, Protocol):
    """Attention over the KV pool of one model."""

    def prepare(self, batch: AttentionBatch) -> None:
        """Prepare attention over `batch`, once for all layers. Later calls of `forward` belong to
        this batch, until the next call of `prepare`."""
        ...

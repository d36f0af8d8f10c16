"""The seam of attention: what a step tells the backend, and what a backend promises to the models.

A backend owns how K and V are stored and read. To add one: a module in `attention/` and a line in BACKENDS; one for
GPUs stands in `device/gpu_parts.py`, with the functions and the sampler that go with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from weft.arrays import IntArray
from weft.config.model import ModelConfig
from weft.executor.attention_layout import Size, Tiling
from weft.executor.kv_pool import KVPool
from weft.models.layers.attention import PagedAttention

BACKENDS = {"torch": "weft.executor.plain.attention:TorchPaged"}


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The requests of one step. Lengths are on the host, where they are known, so that planning needs no device."""

    rows: IntArray  # [R] row of each request in the slot table
    starts: IntArray  # [R] tokens in the cache before this step
    lens: IntArray  # [R] tokens of this step; request i's stand at sum(lens[:i]) and after
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64, where K and V of this step's tokens go
    table: Tensor  # [max_rows, context_length] int32, slot of each token of each row; this step's are in it
    shipped: Shipped | None = (
        None  # what the backend's own `tiling` has laid out, where there is a GPU
    )


class Shipped(NamedTuple):
    """A `Layout` on the device, and its size. While a decode step is captured as a graph, and whenever that graph runs,
    this alone is true of the batch."""

    layout: tuple[Tensor, ...]  # int32, in the order of `Layout`
    size: Size


class AttentionBackend(PagedAttention, Protocol):
    def prepare(self, batch: AttentionBatch) -> None:
        """Plan attention over `batch`, once for all layers. What `forward` gets until the next call belongs to it."""
        ...


def make_backend(name: str, config: ModelConfig, pool: KVPool) -> AttentionBackend:
    """The backend of that name. Raises ValueError for a name that is not there."""
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is unknown; there are {', '.join(BACKENDS)}")
    module, _, cls = BACKENDS[name].partition(":")
    return cast(AttentionBackend, getattr(import_module(module), cls)(config, pool))


class LaidOutBackend(AttentionBackend, Protocol):
    """A backend whose steps are laid out on the host by `tiling` and read from `AttentionBatch.shipped`. A step of
    nothing but decodes, laid out in `tiling.decode_size`, can be captured as a graph."""

    tiling: Tiling

    def expect(self, starts: IntArray, lens: IntArray, size: Size) -> None:
        """A graph of that size is about to be captured, or replayed for requests of these [R] lengths (none while it is
        captured): do outside of it what only the host can do."""
        ...

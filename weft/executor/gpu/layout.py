"""The layout of a step of paged attention for kernels whose launches read no value on the device.

It consists of int32 arrays that the host makes from numbers that it knows, padded to a fixed size,
so that a recorded launch (a CUDA graph) serves every step of that size:

    requests   rows, kv_lens, q_indptr     one entry each; padding has kv_len 0 and no tokens
        tokens     positions, out_slots        a padding token has slot -1
    decodes    decode_req                  requests with one token: their cached tokens are cut
                                           into splits
    tiles      tile_req, tile_start        pieces of the queries of the other requests;
                                           request -1 is padding

Layers that keep a state in place of K and V read a layout of their own, `StateLayout`.

This module knows the shape of a model's heads, but no tensors and no kernel.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from weft.arrays import IntArray, LongArray, consecutive
from weft.executor.backend import AttentionBackend, StepSize
from weft.plan.step import StateSlots

MAX_SPLITS = 64
# Programs of the decode kernel over all requests: two for each one that a processor can hold.
PROGRAMS_PER_PROCESSOR = 8


class StepLayout(NamedTuple):
    """One step on the host; every array int32."""

    rows: IntArray  # [R] row of each request in the slot table
    kv_lens: IntArray  # [R] tokens of each request in the cache after this step
    q_indptr: IntArray  # [R + 1] tokens of request r are at q_indptr[r] : q_indptr[r + 1]
    decode_req: IntArray  # [D] request, 0..R-1; -1: padding
    tile_req: IntArray  # [N] request, 0..R-1; -1: padding
    tile_start: IntArray  # [N] first query of the tile: token * group + head within the group
    positions: IntArray  # [T] 0 in padding
    out_slots: IntArray  # [T] slots for K and V; -1: not stored


class StateLayout(NamedTuple):
    """The states of one step on the host; every array int32. A request without tokens is padding.

    Copies of one request are adjacent, and ascend by length.
    """

    indptr: IntArray  # [R + 1] tokens of request r are at indptr[r] : indptr[r + 1]
    reads: IntArray  # [R] slot of the state before these tokens; negative: all zeros
    writes: IntArray  # [R] slot of the state after them
    kept_indptr: IntArray  # [R + 1] copies of request r are at kept_indptr[r] : kept_indptr[r + 1]
    kept_lens: IntArray  # [K] after how many tokens of this step, from 1 on
    kept_slots: IntArray  # [K] and into which slot


class GpuAttentionBackend(AttentionBackend, Protocol):
    """A backend whose steps `tiling` lays out on the host, and that reads `AttentionBatch.layout`.

    A step of decodes alone, laid out in `tiling.decode_size`, can be captured as a graph.
    """

    tiling: Tiling

    def expect(
        self,
        starts: IntArray,
        lens: IntArray,
        size: StepSize,
    ) -> None:
        """Do the work for a graph of that size that only the host can do, outside of the graph.

        Called before the graph is replayed for requests of these [R] lengths, or captured, with no
        requests.
        """
        ...


class Tiling:
    """Lays out steps for the heads of one model and the tiles of one kernel.

    `group` query heads share a KV head. A tile has `tile_rows` queries of one KV head; the queries
    of one token are adjacent.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        tile_rows: int,
        num_processors: int,
    ) -> None:
        self._num_kv_heads = num_kv_heads
        self._group = num_heads // num_kv_heads
        self._tile_rows = tile_rows
        self._num_processors = num_processors

    def size(self, lens: IntArray) -> StepSize:
        """The smallest size for a step with requests of `lens` [R] tokens."""
        num_decodes = int((lens == 1).sum())
        num_tiles = int(self._num_tiles(lens[lens > 1]).sum())
        return StepSize(
            num_requests=len(lens),
            num_tokens=int(lens.sum()),
            num_decodes=num_decodes,
            num_tiles=num_tiles,
            num_splits=self.num_splits(num_decodes),
        )

    def decode_size(self, num_requests: int) -> StepSize:
        """The size for steps of up to `num_requests` requests with one token each."""
        return StepSize(
            num_requests=num_requests,
            num_tokens=num_requests,
            num_decodes=num_requests,
            num_tiles=0,
            num_splits=self.num_splits(num_requests),
        )

    def extend_size(self, num_tokens: int, num_requests: int) -> StepSize:
        """The size for steps of up to `num_tokens` and `num_requests`, whatever the share of each
        request. Single tokens are tiles, too."""
        # Each request may leave its last tile partly empty.
        num_tiles = num_tokens * self._group // self._tile_rows + num_requests
        return StepSize(
            num_requests=num_requests,
            num_tokens=num_tokens,
            num_decodes=0,
            num_tiles=num_tiles,
            num_splits=1,
        )

    def num_splits(self, num_decodes: int) -> int:
        """Splits of each decoding request, enough for every processor to have work.

        It depends on the number of requests alone, because their lengths differ in every step; and
        it is a power of two, so that few kernels are compiled.
        """
        programs_per_split = max(1, num_decodes * self._num_kv_heads)
        num_programs = PROGRAMS_PER_PROCESSOR * self._num_processors
        wanted = -(-num_programs // programs_per_split)
        return min(MAX_SPLITS, 1 << (wanted - 1).bit_length())

    def lay_out(
        self,
        rows: IntArray,
        starts: IntArray,
        lens: IntArray,
        slots: IntArray,
        size: StepSize,
    ) -> StepLayout:
        """Lay out R requests with `starts` [R] cached tokens and `lens` [R] new ones, whose K and V
        go to `slots` [T]."""
        num = len(rows)
        indptr = np.zeros(size.num_requests + 1, np.int32)
        np.cumsum(lens, out=indptr[1 : num + 1])
        indptr[num + 1 :] = indptr[num]
        # The position of token t of request r is t - q_indptr[r] after its cached tokens.
        positions = np.arange(indptr[num]) + np.repeat(starts - indptr[:num], lens)
        decodes = np.empty(0, np.int64)
        if size.num_decodes:
            decodes = np.flatnonzero(lens == 1)
        tile_req, tile_start = self._tiles(starts, lens, without=decodes)
        return StepLayout(
            rows=_filled(rows, size.num_requests, 0),
            kv_lens=_filled(starts + lens, size.num_requests, 0),
            q_indptr=indptr,
            decode_req=_filled(decodes, size.num_decodes, -1),
            tile_req=_filled(tile_req, size.num_tiles, -1),
            tile_start=_filled(tile_start, size.num_tiles, 0),
            positions=_filled(positions, size.num_tokens, 0),
            out_slots=_filled(slots, size.num_tokens, -1),
        )

    def _tiles(
        self, starts: IntArray, lens: IntArray, without: LongArray
    ) -> tuple[LongArray, LongArray]:
        """Request and first query of every tile, those that see the most keys first, because the
        step would have to wait for a long tile that starts last."""
        num_tiles = self._num_tiles(lens)
        num_tiles[without] = 0
        tile_req = np.repeat(np.arange(len(lens)), num_tiles)
        tile_start = consecutive(np.zeros_like(num_tiles), num_tiles) * self._tile_rows
        num_keys = starts[tile_req] + tile_start // self._group
        order = np.argsort(-num_keys, kind="stable")
        return tile_req[order], tile_start[order]

    def _num_tiles(self, lens: IntArray) -> LongArray:
        num_queries = lens.astype(np.int64) * self._group
        return -(-num_queries // self._tile_rows)


def lay_out_states(
    lens: IntArray,
    slots: StateSlots | None,
    num_requests: int,
    num_kept: int,
) -> StateLayout:
    """The layout for requests with `lens` [R] tokens, padded to `num_requests` and to `num_kept`
    copies of states. Without `slots`, all is padding."""
    layout = StateLayout(
        indptr=np.zeros(num_requests + 1, np.int32),
        reads=np.zeros(num_requests, np.int32),
        writes=np.zeros(num_requests, np.int32),
        kept_indptr=np.zeros(num_requests + 1, np.int32),
        kept_lens=np.zeros(num_kept, np.int32),
        kept_slots=np.zeros(num_kept, np.int32),
    )
    if slots is None:
        return layout
    num = len(lens)
    kept = len(slots.kept_rows)
    assert num <= num_requests
    assert kept <= num_kept, f"{kept} copies of states where there is room for {num_kept}"
    np.cumsum(lens, out=layout.indptr[1 : num + 1])
    layout.indptr[num + 1 :] = layout.indptr[num]
    layout.reads[:num] = slots.reads
    layout.writes[:num] = slots.writes
    order = np.lexsort((slots.kept_lens, slots.kept_rows))
    of_rows = np.bincount(slots.kept_rows, minlength=num_requests)
    np.cumsum(of_rows, out=layout.kept_indptr[1:])
    layout.kept_lens[:kept] = slots.kept_lens[order]
    layout.kept_slots[:kept] = slots.kept_slots[order]
    return layout


def _filled(
    values: IntArray | LongArray,
    size: int,
    filling: int,
) -> IntArray:
    assert len(values) <= size, f"{len(values)} where there is room for {size}"
    padding = np.full(size - len(values), filling)
    return np.concatenate(
        (values, padding),
        dtype=np.int32,
        casting="same_kind",
    )

"""How the work of paged attention is laid out for kernels whose launches must not depend on values on the device.

All of it is arrays of int32 that are made on the host, from what is known there, and filled up to a fixed size, so that
a recorded launch (a CUDA graph) serves every step of that size:

    requests   rows, kv_lens, q_indptr        one entry each; a request that is padding has kv_len 0 and no tokens
    tokens     positions, out_slots           a token that is padding has slot -1
    decodes    decode_req                     requests with one token: their cached tokens are cut into splits
    tiles      tile_req, tile_start           pieces of the queries of the other requests; request -1: padding
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.arrays import IntArray, LongArray, consecutive

MAX_SPLITS = 64
PROGRAMS_PER_PROCESSOR = (
    8  # of the decode kernel, over all requests: two for each that a processor holds at a time
)


class Size(NamedTuple):
    """The lengths of the arrays of a step: with `num_splits` all that its launches depend on."""

    num_requests: int  # R
    num_tokens: int  # T
    num_decodes: int  # D
    num_tiles: int  # N
    num_splits: int  # into so many parts the cached tokens of a request in `decode_req` are cut

    def holds(self, other: Size) -> bool:
        """Whether a step of the other size can be laid out in this one."""
        return all(mine >= theirs for mine, theirs in zip(self[:4], other[:4], strict=True))


class Layout(NamedTuple):
    """One step, on the host or (`PagedStep`) on the device; every array int32."""

    rows: IntArray  # [R] row of each request in the table of slots
    kv_lens: IntArray  # [R] tokens of each request in the cache after this step
    q_indptr: IntArray  # [R + 1] request r's tokens stand at q_indptr[r] : q_indptr[r + 1]
    decode_req: IntArray  # [D] request, 0..R-1; -1: padding
    tile_req: IntArray  # [N] request, 0..R-1; -1: padding
    tile_start: IntArray  # [N] the tile's first query: token * group + head within the group, from the request's first
    positions: IntArray  # [T] 0 in padding
    out_slots: IntArray  # [T] where K and V go; -1: nowhere


class Tiling:
    """What the layout must know of the model and its kernels: `group` query heads share a KV head, and a tile has
    `tile_rows` queries of one KV head, those of a token side by side."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, tile_rows: int, num_processors: int
    ) -> None:
        self._kv_heads, self._group = num_kv_heads, num_heads // num_kv_heads
        self._tile_rows = tile_rows
        self._num_processors = num_processors

    def size(self, lens: IntArray) -> Size:
        """The least size for a step with requests of `lens` [R] tokens."""
        one = int((lens == 1).sum())
        tiles = int(self._tiles(lens[lens > 1]).sum())
        return Size(len(lens), int(lens.sum()), one, tiles, self.num_splits(one))

    def decode_size(self, num_requests: int) -> Size:
        """For steps of up to `num_requests` requests with one token each."""
        return Size(num_requests, num_requests, num_requests, 0, self.num_splits(num_requests))

    def extend_size(self, num_tokens: int, num_requests: int) -> Size:
        """For steps of up to so many tokens and requests, however they are shared out; single tokens are tiles, too."""
        return Size(
            num_requests,
            num_tokens,
            0,
            num_tokens * self._group // self._tile_rows + num_requests,
            1,
        )

    def num_splits(self, num_decodes: int) -> int:
        """Enough parts for every processor to have work, however long the requests are. It follows from the number of
        requests alone, for their lengths are different in every step; and is a power of two, for few kernels."""
        wanted = -(
            -PROGRAMS_PER_PROCESSOR * self._num_processors // max(1, num_decodes * self._kv_heads)
        )
        return min(MAX_SPLITS, 1 << (wanted - 1).bit_length())

    def lay_out(
        self, rows: IntArray, starts: IntArray, lens: IntArray, slots: IntArray, size: Size
    ) -> Layout:
        """R requests with `starts` [R] cached tokens and `lens` [R] new ones, whose K and V go to `slots` [T]."""
        num = len(rows)
        indptr = np.zeros(size.num_requests + 1, np.int32)
        np.cumsum(lens, out=indptr[1 : num + 1])
        indptr[num + 1 :] = indptr[num]
        positions = np.arange(indptr[num]) + np.repeat(starts - indptr[:num], lens)
        one = np.flatnonzero(lens == 1) if size.num_decodes else np.empty(0, np.int64)
        tile_req, tile_start = self._tile(starts, lens, without=one)
        return Layout(
            rows=_filled(rows, size.num_requests, 0),
            kv_lens=_filled(starts + lens, size.num_requests, 0),
            q_indptr=indptr,
            decode_req=_filled(one, size.num_decodes, -1),
            tile_req=_filled(tile_req, size.num_tiles, -1),
            tile_start=_filled(tile_start, size.num_tiles, 0),
            positions=_filled(positions, size.num_tokens, 0),
            out_slots=_filled(slots, size.num_tokens, -1),
        )

    def _tile(
        self, starts: IntArray, lens: IntArray, without: LongArray
    ) -> tuple[LongArray, LongArray]:
        """Request and first query of every tile. Those that see most keys come first: a long tile that starts last
        would be what the step waits for."""
        num_tiles = self._tiles(lens)
        num_tiles[without] = 0
        tile_req = np.repeat(np.arange(len(lens)), num_tiles)
        tile_start = consecutive(np.zeros_like(num_tiles), num_tiles) * self._tile_rows
        order = np.argsort(-(starts[tile_req] + tile_start // self._group), kind="stable")
        return tile_req[order], tile_start[order]

    def _tiles(self, lens: IntArray) -> LongArray:
        return -(-lens.astype(np.int64) * self._group // self._tile_rows)


def _filled(values: IntArray | LongArray, size: int, filling: int) -> IntArray:
    assert len(values) <= size, f"{len(values)} where there is room for {size}"
    return np.concatenate(
        (values, np.full(size - len(values), filling)), dtype=np.int32, casting="same_kind"
    )

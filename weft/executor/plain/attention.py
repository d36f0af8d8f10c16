"""Paged attention in plain torch: correct on every device, and the specification of the faster
implementations.

K and V are gathered from their slots for torch's scaled dot product, which accumulates and computes
its softmax in float32. Requests with one token (decode) of similar length share a call. Requests
with more tokens (prompts, or chunks of them) are computed one by one, in blocks of queries, each
against the keys that the block can see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.arrays import IntArray, LongArray
from weft.config.model import ModelConfig
from weft.config.sight import Sight
from weft.executor.backend import AttentionBatch
from weft.executor.kv_pool import KVPool
from weft.executor.plain.indexed import IndexedAttention
from weft.models.layers.attention import Heads
from weft.models.layers.rope import Rope, RotaryTables
from weft.ops.attention import softmax_with_sinks

# Queries of one request that share a call. The call leaves out keys after the last query.
QUERY_BLOCK = 128
# Bytes of K that one decode call gathers: few enough to be still in the processor's cache when they
# are read again.
GROUP_BYTES = 1 << 20
# Requests share a call if the shortest has at least this fraction of the longest's tokens.
GROUP_PADDING = 0.75


class DecodeGroup(NamedTuple):
    """Requests of similar length that get one token each."""

    tokens: Tensor  # [G] indices of their tokens in the step
    slots: Tensor  # [G * L] slots of the tokens that they see, padded with one of their own slots
    mask: Tensor | None  # [G, 1, 1, L] false for padding; None: nothing is padded
    distances: Tensor  # [G, L] of each of these tokens from the query, 0 or less


class Extend(NamedTuple):
    """A request that gets several tokens."""

    start: int  # its queries are start:stop in the step
    stop: int
    slots: Tensor  # [L] slots of the tokens that they see, including themselves
    # [stop - start] exclusive end in `slots` of the tokens that each query sees; None: each query
    # sees up to itself
    ends: LongArray | None


class SightWork(NamedTuple):
    """The work of all layers with the same sight in this step."""

    slots: Tensor  # [T] slots for K and V of the step's tokens
    groups: list[DecodeGroup]
    extends: list[Extend]


class TorchPaged:
    """The `AttentionBackend` in torch, on any device."""

    def __init__(self, config: ModelConfig, pool: KVPool) -> None:
        if pool.k_scale:
            raise ValueError("attention backend 'torch' cannot read KV in int8")
        keys = pool.k[0]
        self._pool = pool
        self._num_heads = config.num_heads
        self._shapes = [config.kv_shape(layer) for layer in range(config.num_layers)]
        self._sights = [config.sight(layer) for layer in range(config.num_layers)]
        token_bytes = max(math.prod(shape) for shape in self._shapes) * keys.element_size()
        self._group_tokens = GROUP_BYTES // token_bytes
        self._masks: dict[Sight, CausalMask] = {}
        for sight in self._sights:
            self._masks[sight] = CausalMask(sight, keys.dtype, keys.device)
        self._work: dict[Sight, SightWork] = {}
        self._positions = torch.empty(0)
        self._rotations: dict[Rope, RotaryTables] = {}  # of this step
        self._indexed = IndexedAttention(pool)

    def prepare(self, batch: AttentionBatch) -> None:
        self._positions = batch.positions
        if batch.rotation is not None:
            self._positions = torch.from_numpy(batch.rotation).to(batch.positions.device)
        self._rotations.clear()
        self._indexed.prepare(batch)
        for sight in self._masks:
            seen = batch.seen_by(sight.window)
            groups = list(self._decode_groups(seen, sight))
            extends = list(_extends(seen, sight))
            self._work[sight] = SightWork(seen.slots, groups, extends)

    def narrow(self, x: Tensor) -> Tensor:
        return x

    def forward(
        self,
        qkv: Tensor,
        heads: Heads,
        layer: int,
    ) -> Tensor:
        chooser = heads.chooser
        columns = qkv[:, :0]
        if chooser is not None:
            sizes = (qkv.shape[1] - chooser.size, chooser.size)
            qkv, columns = qkv.split_with_sizes(sizes, 1)
        q, k, v, gate = self._rotated(qkv, heads, layer)
        keys = self._pool.k[layer]
        values = self._pool.v[layer]
        sight = self._sights[layer]
        work = self._work[sight]
        # Stored before they are read, because tokens of a prompt see each other through the cache.
        if not heads.reads_earlier:
            keys.index_copy_(0, work.slots, k.to(keys.dtype))
            if self._pool.has_values:
                values.index_copy_(0, work.slots, v.to(values.dtype))
        q = q.to(keys.dtype)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        # Gathers K and V of this step's tokens together with the cached ones.
        for group in work.groups:
            k = keys.index_select(0, group.slots)
            v = values.index_select(0, group.slots)
            out[group.tokens] = _decode(
                q[group.tokens],
                k,
                v,
                group,
                heads,
            )
        causal = self._masks[sight]
        for start, stop, slots, ends in work.extends:
            here = slice(start, stop)
            k = keys.index_select(0, slots)
            v = values.index_select(0, slots)
            _extend(
                q[here],
                k,
                v,
                causal,
                out[here],
                heads,
                ends if heads.sees_later else None,
            )
        if chooser is not None:
            tables = self._tables(chooser.rope, qkv.dtype)
            by_index = self._indexed.store(columns, chooser, tables, work.slots, layer)
            self._indexed.overwrite(by_index, q, heads, layer, out)
        out = out.to(qkv.dtype)
        if gate is not None:
            out = out * torch.sigmoid(gate)
        return out.flatten(1)

    def _rotated(
        self,
        qkv: Tensor,
        heads: Heads,
        layer: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k and v [T, heads, D], normalised and rotated as the layer does; and the gates of the
        queries, if the layer has them. A layer that reads earlier keys has no k and v."""
        of_keys, head_dim = self._shapes[layer]
        by_head = qkv.view(len(qkv), -1, head_dim)
        of_values = of_keys
        if heads.reads_earlier:
            of_keys = 0
            of_values = 0
        elif heads.values_are_keys or not self._pool.has_values:
            of_values = 0
        of_queries = by_head.shape[1] - of_keys - of_values
        q, k, v = by_head.split_with_sizes((of_queries, of_keys, of_values), 1)
        gate = None
        if heads.is_gated:
            q, gate = q.view(len(q), self._num_heads, 2, head_dim).unbind(2)
        if heads.values_are_keys:
            v = k
        v = heads.norm_values(v)
        q, k = heads.prepare(q, k, self._tables(heads.rope, qkv.dtype))
        return q, k, v, gate

    def _tables(self, rope: Rope | None, dtype: torch.dtype) -> RotaryTables | None:
        """The rotary tables of this step."""
        if rope is None:
            return None
        if rope not in self._rotations:
            self._rotations[rope] = rope.tables(self._positions, dtype)
        return self._rotations[rope]

    def _decode_groups(self, batch: AttentionBatch, sight: Sight) -> Iterator[DecodeGroup]:
        """Group the requests with one token, sorted by length. A new group begins where padding or
        the group would become too large."""
        device = batch.table.device
        decodes = np.flatnonzero(batch.lens == 1)
        stops = batch.starts[decodes] + 1
        first = sight.firsts(stops - 1)
        lens = stops - first
        # Groups of consecutive requests in ascending order of length need least padding.
        order = np.argsort(lens, kind="stable")
        decodes = decodes[order]
        first = first[order]
        lens = lens[order]
        last_tokens = np.cumsum(batch.lens) - 1
        tokens = last_tokens[decodes]
        for begin, end in _cut(lens, self._group_tokens):
            here = slice(begin, end)
            offsets = np.arange(lens[end - 1])  # [L]
            inside = offsets < lens[here, None]  # [G, L]
            # Padding repeats a slot of the same request, because V of another request may not be
            # finite, and 0 times NaN is NaN.
            begins = first[here, None]
            columns = np.where(inside, begins + offsets, begins)
            mask = None
            if not inside.all():
                mask = torch.from_numpy(inside[:, None, None]).to(device)
            yield DecodeGroup(
                tokens=torch.from_numpy(tokens[here]).to(device),
                slots=_lookup(batch, batch.rows[decodes[here], None], columns),
                mask=mask,
                distances=torch.from_numpy(columns - (stops - 1)[order][here, None]).to(device),
            )


class CausalMask:
    """The additive mask of n consecutive queries against the L keys up to the last query.

    Unless keys are seen by chunks, a mask depends only on the distances between queries and keys.
    So every mask is the lower right corner of one large mask, which grows as needed:

             keys ->              L
        .  .  . +------------------+     . = 0: seen, when not beyond the window
        .  .  . | .  .  .  .  . -inf    n
        .  .  . | .  .  .  .  .  . |
                +------------------+
    """

    def __init__(
        self,
        sight: Sight,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._sight = sight
        self._mask = torch.empty(
            QUERY_BLOCK,
            0,
            dtype=dtype,
            device=device,
        )

    def first_seen(self, query: int) -> int:
        """The first key that a query sees, if keys are counted from a chunk's start on."""
        return self._sight.first(query)

    def up_to(self, first_query: int, num_queries: int, seen: slice) -> Tensor:
        """The mask [num_queries, keys] of consecutive queries against the keys `seen`, the last of
        which is that of the last query."""
        if self._sight.chunked:
            ends = np.arange(first_query + 1, first_query + num_queries + 1)
            return self.with_ends(first_query, ends, seen)
        return self._corner(num_queries, seen.stop - seen.start)

    def _corner(self, num_queries: int, num_keys: int) -> Tensor:
        """The mask [num_queries, num_keys], a view."""
        if num_keys > self._mask.shape[1]:
            self._mask = self._make(2 * num_keys)
        first_row = QUERY_BLOCK - num_queries
        first_column = self._mask.shape[1] - num_keys
        return self._mask[first_row:, first_column:]

    def with_ends(self, first_query: int, ends: LongArray, seen: slice) -> Tensor:
        """The mask [n, keys] of consecutive queries against the keys `seen`, if query i sees keys
        up to ends[i] (exclusive)."""
        device = self._mask.device
        queries = torch.arange(first_query, first_query + len(ends), device=device)[:, None]
        keys = torch.arange(seen.start, seen.stop, device=device)
        hidden = keys >= torch.from_numpy(ends).to(device)[:, None]
        if self._sight.chunked:
            hidden |= keys < queries - queries % self._sight.window
        elif self._sight.window:
            hidden |= queries - keys >= self._sight.window
        nothing = torch.zeros(hidden.shape, dtype=self._mask.dtype, device=device)
        return nothing.masked_fill_(hidden, float("-inf"))

    def _make(self, num_keys: int) -> Tensor:
        device = self._mask.device
        queries = torch.arange(num_keys - QUERY_BLOCK, num_keys, device=device)[:, None]
        keys = torch.arange(num_keys, device=device)
        distance = queries - keys
        hidden = distance < 0
        if self._sight.window:
            hidden |= distance >= self._sight.window
        seen = torch.zeros_like(distance, dtype=self._mask.dtype)
        return seen.masked_fill_(hidden, float("-inf"))


def _cut(lens: IntArray, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Ranges of the ascending `lens` with little padding and a padded size of at most `max_tokens`;
    a range has at least one request."""
    begin = 0
    while begin < len(lens):
        longest = lens[begin] / GROUP_PADDING
        similar = int(np.searchsorted(lens, longest, side="right"))
        small = begin + max(1, int(max_tokens / longest))
        end = min(similar, small)
        yield begin, end
        begin = end


def _extends(batch: AttentionBatch, sight: Sight) -> Iterator[Extend]:
    stops = np.cumsum(batch.lens)
    for request in np.flatnonzero(batch.lens > 1):
        num_cached = int(batch.starts[request])
        num_new = int(batch.lens[request])
        stop = int(stops[request])
        first = sight.first(num_cached)
        row = batch.table[int(batch.rows[request])]
        slots = row[first : num_cached + num_new].long()
        ends = None
        if batch.sees_to is not None:
            ends = batch.sees_to[stop - num_new : stop].astype(np.int64) - first
        yield Extend(stop - num_new, stop, slots, ends)


def _lookup(
    batch: AttentionBatch,
    rows: IntArray,
    columns: IntArray,
) -> Tensor:
    """The slots table[rows, columns], flattened."""
    context_length = batch.table.shape[1]
    places = rows.astype(np.int64) * context_length + columns
    index = torch.from_numpy(places.ravel()).to(batch.table.device)
    return batch.table.view(-1)[index].long()


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: DecodeGroup,
    heads: Heads,
) -> Tensor:
    """q [G, heads, D], k and v [G * L, kv_heads, D] -> [G, heads, D].

    The queries that share a KV head take the place of the queries of consecutive tokens, because
    they all see the same keys.
    """
    num, num_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(
        num,
        kv_heads,
        num_heads // kv_heads,
        head_dim,
    )
    shape = (num, -1, kv_heads, head_dim)
    k = k.view(shape).transpose(1, 2)
    v = v.view(shape).transpose(1, 2)
    sinks = heads.sinks
    if sinks is not None:
        sinks = sinks.view(kv_heads, -1, 1)
    mask = group.mask
    if heads.biases is not None:
        biases = heads.biases.of(group.distances).to(q.dtype).transpose(0, 1)
        biases = biases.view(num, kv_heads, num_heads // kv_heads, -1)
        mask = biases if mask is None else biases.masked_fill(~mask, -torch.inf)
    out = _attend(
        grouped,
        k,
        v,
        mask,
        heads,
        sinks,
    )
    return out.reshape(num, num_heads, head_dim)


def _extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: CausalMask,
    out: Tensor,
    heads: Heads,
    ends: LongArray | None,
) -> None:
    """q [n, heads, D], k and v [L, kv_heads, D] -> out [n, heads, D]. The last query is the token
    of the last key. `ends` as in `Extend`."""
    num = len(q)
    num_cached = len(k) - num
    q = q.transpose(0, 1)[None]
    k = k.transpose(0, 1)[None]
    v = v.transpose(0, 1)[None]
    sinks = heads.sinks
    if sinks is not None:
        sinks = sinks[:, None, None]
    for begin in range(0, num, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, num)
        first_seen = mask.first_seen(num_cached + begin)
        seen = slice(first_seen, num_cached + end)
        if ends is None:
            seen_by_each = mask.up_to(num_cached + begin, end - begin, seen)
        else:
            # Ends ascend, so the last query of the block sees most.
            seen = slice(first_seen, int(ends[end - 1]))
            seen_by_each = mask.with_ends(num_cached + begin, ends[begin:end], seen)
        if heads.biases is not None:
            device = q.device
            queries = torch.arange(num_cached + begin, num_cached + end, device=device)[:, None]
            keys = torch.arange(seen.start, seen.stop, device=device)
            # Keys after the query are masked.
            distances = (keys - queries).clamp(max=0)
            seen_by_each = seen_by_each + heads.biases.of(distances).to(q.dtype)
        block = _attend(
            q[:, :, begin:end],
            k[:, :, seen],
            v[:, :, seen],
            seen_by_each,
            heads,
            sinks,
        )
        out[begin:end] = block[0].transpose(0, 1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    heads: Heads,
    sinks: Tensor | None,
) -> Tensor:
    """q [.., heads, n, D], k and v [.., kv_heads, L, D] -> as q. `mask`: bool, true for keys that a
    query sees; or floats that are added to the scores. `sinks` [heads, n or 1, 1]."""
    if not heads.cap and sinks is None:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            scale=heads.scale or None,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    # torch's function supports neither a cap nor sinks.
    group = q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(group, dim=1).float()
    values = v.repeat_interleave(group, dim=1).float()
    products = q.float() @ keys.transpose(-1, -2)
    scores = products * heads.score_scale(q.shape[-1])
    if heads.cap:
        scores = torch.tanh(scores / heads.cap) * heads.cap
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    return (softmax_with_sinks(scores, sinks) @ values).to(q.dtype)

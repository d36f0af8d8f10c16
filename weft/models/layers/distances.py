"""Scores by the distance of a key from its query: a number of each head, or products with vectors
of distances."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from weft.config.encoder_spec import DisentangledSpec, DistanceBuckets
from weft.models.layers.weight import Weight
from weft.ops.protocol import Ops

# Kernels read full slabs of keys, so a table has as many entries after the farthest key.
PADDING = 64


class Biases(NamedTuple):
    """A number of each head for each distance, which its scores get."""

    values: Tensor  # [heads, reach + PADDING or more], float32; distance 0 is at index `reach`
    reach: int

    def of(self, distances: Tensor) -> Tensor:
        """distances [..] of keys from queries, integers -> [heads, ..]"""
        return self.values.to(distances.device)[:, distances + self.reach]


def empty_biases(
    num_heads: int,
    reach: int,
    ops: Ops,
) -> Biases:
    """Biases for distances below `reach`, to be filled with weights."""
    size = 2 * reach + PADDING
    values = ops.vector(num_heads * size, exact=True)
    values.zero_()
    return Biases(values.view(num_heads, size), reach)


def alibi(
    num_heads: int,
    most: float,
    reach: int,
    ops: Ops,
) -> Biases:
    """Biases of ALiBi for keys up to `reach` tokens before the query, of the heads that this
    process computes. `most`: the largest exponent of a slope."""
    slopes = ops.of_heads(alibi_slopes(num_heads, most))
    distances = torch.arange(-reach, PADDING)
    # Keys after the query are not seen.
    return Biases(slopes[:, None] * distances.clamp(max=0), reach)


def alibi_slopes(num_heads: int, most: float) -> Tensor:
    """The slope of each head, [heads]: 2^-x, x rising evenly to `most` over the next power of two.
    Source: arXiv:2108.12409, 3; heads that are no power of two: its published code."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = torch.exp2(-torch.arange(1, power + 1) * (most / power))
    if power == num_heads:
        return slopes
    # Those of half as many heads first; then every other one of those between them.
    return torch.cat((slopes[1::2], slopes[::2]))[:num_heads]


class BucketBiases:
    """The biases of buckets of distances (`DistanceBuckets`)."""

    def __init__(
        self,
        spec: DistanceBuckets,
        num_heads: int,
        reach: int,
        ops: Ops,
    ) -> None:
        self._spec = spec
        self._table = ops.vector(spec.num_buckets * num_heads, exact=True)
        self._num_heads = num_heads
        self.biases = empty_biases(num_heads, reach, ops)

    def weight(self, prefix: str) -> Weight:
        """The checkpoint's table [num_buckets, heads]."""
        shape = (self._spec.num_buckets, self._num_heads)

        def put(
            content: Tensor,
            start: int = 0,
            scales: Tensor | None = None,
        ) -> None:
            assert scales is None
            table = self._table.view(shape)
            table[start : start + len(content)].copy_(content)
            values, reach = self.biases
            distances = torch.arange(-reach, values.shape[1] - reach, device=values.device)
            values.copy_(table[buckets(distances, self._spec)].T)

        def get(start: int = 0, stop: int | None = None) -> Tensor:
            return self._table.view(shape)[start:stop].clone()

        return Weight(f"{prefix}.weight", shape, put, get)


def buckets(distances: Tensor, spec: DistanceBuckets) -> Tensor:
    """The bucket of each distance of a key from its query."""
    num = spec.num_buckets // 2  # of either direction
    num_exact = num // 2
    after = (distances > 0).long() * num
    far = distances.abs()
    wide = math.log(spec.max_distance / num_exact)
    # The logarithm of 0 is cut off by `where`.
    steps = torch.log(far.float() / num_exact) / wide * (num - num_exact)
    in_wide = (num_exact + steps.clamp(min=0).long()).clamp(max=num - 1)
    return after + torch.where(far < num_exact, far, in_wide)


class DistanceVectors(NamedTuple):
    """Keys and queries of distances, which the queries and keys of tokens meet."""

    spec: DisentangledSpec
    keys: Tensor | None  # [2 * span, heads * D]
    queries: Tensor | None

    def scores(
        self,
        q: Tensor,
        k: Tensor,
    ) -> Tensor:
        """q and k [.., heads, L, D] -> what their unscaled products get, [.., heads, L, L]"""
        heads, length, dim = q.shape[-3:]
        index = self._index(length, q.device)
        total = torch.zeros((*q.shape[:-1], length), dtype=q.dtype, device=q.device)
        if self.keys is not None:
            keys = self.keys.view(-1, heads, dim).transpose(0, 1)
            of_queries = q @ keys.transpose(-1, -2)  # [.., heads, L, 2 * span]
            total += of_queries.gather(-1, index.expand(total.shape))
        if self.queries is not None:
            queries = self.queries.view(-1, heads, dim).transpose(0, 1)
            of_keys = k @ queries.transpose(-1, -2)
            # The distance is that of the query from the key, as a row of the result has it.
            total += of_keys.gather(-1, index.T.expand(total.shape)).transpose(-1, -2)
        return total

    def _index(
        self,
        length: int,
        device: torch.device,
    ) -> Tensor:
        """[L, L] the vector of the distance from each query to each key."""
        places = torch.arange(length, device=device)
        distances = places[:, None] - places
        span = self.spec.span
        found = log_buckets(distances, self.spec) + span
        return found.clamp(0, 2 * span - 1)


def log_buckets(distances: Tensor, spec: DisentangledSpec) -> Tensor:
    """Distances, of which those beyond half of the buckets share one by logarithms."""
    if not spec.num_buckets:
        return distances
    middle = spec.num_buckets // 2
    far = distances.abs().clamp(min=middle - 1)
    widest = torch.log(torch.tensor((spec.max_distance - 1) / middle))
    steps = torch.ceil(torch.log(far / middle) / widest * (middle - 1)) + middle
    found = torch.where(far <= middle, distances.float(), steps * distances.sign())
    return found.long()

"""Multi-head latent attention (`LatentSpec`): the cache keeps one vector per token for all heads.

    x ─ latent_in ─▶ [rotated | norm(latent)]                      key and value of the token
    x ─ queries ─▶ [plain | rotated] ─▶ [rotated | K^T plain]      queries of each head
    attention ─▶ [.. | mixed latents] ─ V ─▶ values of each head ─ out ─▶

A checkpoint holds K [plain, rank] and V [value, rank] of each head in one tensor. K is applied to
the queries and V after attention, so that no key and no value of a token is ever computed.
Source: arXiv:2405.04434, 2.1 and appendix C.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from weft.config.decoder import LatentSpec
from weft.config.model import ModelConfig
from weft.models.layers.attention import Heads, PagedAttention
from weft.models.layers.indexer import Indexer
from weft.models.layers.linear import Linear, stacked, stacked_bias
from weft.models.layers.norm import RmsNorm
from weft.models.layers.rope import Rope
from weft.models.layers.weight import RowRun, Weight, Weights
from weft.ops.codes import CodeFormat, Codes
from weft.ops.protocol import Matrix, Ops
from weft.ops.quantize import widened


class LatentAttention:
    """out(V attention(K^T queries(x), latent(x)))"""

    def __init__(
        self,
        config: ModelConfig,
        latent: LatentSpec,
        layer: int,
        rope: Rope | None,
        ops: Ops,
    ) -> None:
        spec = config.decoder.layer(layer).attention
        names = config.decoder.names
        hidden = config.hidden_size
        self._num_heads = config.num_heads
        self._latent = latent
        self._layer = layer
        self._ops = ops
        self._names = names
        narrows = layer == config.last_storing_layer
        self._indexer: Indexer | None = None
        if latent.indexer is not None:
            assert rope is not None, "an indexer rotates its heads as attention does"
            self._indexer = Indexer(config, latent, latent.indexer, rope, ops)
        chooser = None if self._indexer is None else self._indexer.chooser
        self._heads = Heads(rope, None, None, spec.scale, narrows=narrows, chooser=chooser)
        self._latent_in = LatentInput(config, latent, spec.qkv_bias, ops)
        self._latent_norm = RmsNorm(latent.rank, latent.norm_eps, ops)
        self._query_in: Linear | None = None
        self._query_norm: RmsNorm | None = None
        num_queries = config.num_heads * latent.query_dim
        if latent.query_rank:
            parts = {names.latent.query_in: latent.query_rank}
            self._query_in = Linear(hidden, parts, spec.qkv_bias, ops)
            self._query_norm = RmsNorm(latent.query_rank, latent.norm_eps, ops)
            parts = {names.latent.query_out: num_queries}
            self._queries = Linear(latent.query_rank, parts, False, ops)
        else:
            self._queries = Linear(hidden, {names.latent.queries: num_queries}, False, ops)
        self._of_heads = HeadMatrices(config.num_heads, latent, ops)
        num_values = config.num_heads * latent.value_dim
        self._out = Linear(num_values, {names.out: hidden}, spec.out_bias, ops)

    def __call__(self, x: Tensor, attention: PagedAttention) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        ops = self._ops
        latent = self._latent
        # Computed now, because one or two products read it.
        x = ops.computed(x)
        size = (self._num_heads + 1) * latent.key_dim
        index_size = 0 if self._indexer is None else self._indexer.chooser.size
        qk = ops.space(x, size + index_size)
        key = qk[:, size - latent.key_dim : size]
        ops.linear_into(x, self._latent_in.matrix, key)
        ops.norm_overwrites(key[:, latent.rotated_dim :], self._latent_norm.norm)
        queries = x
        if self._query_in is not None and self._query_norm is not None:
            queries = self._query_norm(self._query_in(x))
        if self._indexer is not None:
            queries = ops.computed(queries)
            self._indexer.write(x, queries, qk[:, size:])
        queries = ops.computed(self._queries(queries))
        by_head = queries.view(len(queries), self._num_heads, latent.query_dim)
        at_keys = qk[:, :size].view(len(qk), self._num_heads + 1, latent.key_dim)[:, :-1]
        ops.copy(by_head[:, :, latent.plain_dim :], at_keys[:, :, : latent.rotated_dim])
        for head, matrix in enumerate(self._of_heads.keys):
            plain = by_head[:, head, : latent.plain_dim]
            ops.linear_into(plain, matrix, at_keys[:, head, latent.rotated_dim :])
        mixed = attention.forward(qk, self._heads, self._layer)
        mixed = mixed.view(len(mixed), self._num_heads, latent.key_dim)
        values = ops.space(x, self._num_heads * latent.value_dim)
        for head, matrix in enumerate(self._of_heads.values):
            columns = slice(head * latent.value_dim, (head + 1) * latent.value_dim)
            ops.linear_into(mixed[:, head, latent.rotated_dim :], matrix, values[:, columns])
        return self._out(values)

    def weights(self, prefix: str) -> Weights:
        names = self._names.latent
        if self._query_in is not None and self._query_norm is not None:
            yield from self._query_in.weights(prefix)
            yield from self._query_norm.weights(f"{prefix}.{names.query_norm}")
        yield from self._queries.weights(prefix)
        yield from self._latent_in.weights(f"{prefix}.{names.latent_in}")
        yield from self._latent_norm.weights(f"{prefix}.{names.latent_norm}")
        if names.keys_out:
            latent = self._latent
            keys = HeadRows(self._of_heads.keys, latent.rank, latent.plain_dim)
            values = HeadRows(self._of_heads.values, latent.value_dim, latent.rank)
            yield keys.weight(f"{prefix}.{names.keys_out}.weight")
            yield values.weight(f"{prefix}.{names.values_out}.weight")
        else:
            yield self._of_heads.weight(f"{prefix}.{names.latent_out}.weight")
        if self._indexer is not None:
            yield from self._indexer.weights(f"{prefix}.{names.indexer}")
        yield from self._out.weights(prefix)


class LatentInput:
    """The product that computes the latent and the rotated part of a token. Checkpoints have the
    latent first; here the rotated part is first, because attention rotates the first values of a
    head."""

    def __init__(self, config: ModelConfig, latent: LatentSpec, bias: bool, ops: Ops) -> None:
        sizes = (latent.rotated_dim, latent.rank)
        self.matrix = ops.matrix(config.hidden_size, sizes, bias=bias)
        self._in_size = config.hidden_size
        self._bias = bias
        self._runs = [
            RowRun(1, 0, 0, latent.rank),
            RowRun(0, 0, latent.rank, latent.rotated_dim),
        ]

    def weights(self, prefix: str) -> Weights:
        yield stacked(f"{prefix}.weight", self.matrix, self._in_size, self._runs)
        if self._bias:
            yield stacked_bias(f"{prefix}.bias", self.matrix, self._runs)


class HeadMatrices:
    """K^T and V of each head. A checkpoint has them in one tensor: the rows of K of a head, then
    the rows of its V, then those of the next head."""

    def __init__(self, num_heads: int, latent: LatentSpec, ops: Ops) -> None:
        self._latent = latent
        self.keys: list[Matrix] = []
        self.values: list[Matrix] = []
        for _ in range(num_heads):
            self.keys.append(ops.matrix(latent.plain_dim, (latent.rank,)))
            self.values.append(ops.matrix(latent.rank, (latent.value_dim,)))
        self._coming: Tensor | None = None  # rows of one head, until it is complete
        self._num_come = 0

    def weight(self, name: str) -> Weight:
        num_rows = len(self.keys) * self._rows_of_head
        return Weight(name, (num_rows, self._latent.rank), self._put, self._get, None, self._codes)

    @property
    def _rows_of_head(self) -> int:
        return self._latent.plain_dim + self._latent.value_dim

    def _put(self, content: Tensor, start: int = 0, scales: Tensor | None = None) -> None:
        # Rows of K are columns of K^T, so a head is stored when all of its rows have come. The
        # pieces of a tensor come in order.
        rows = widened(content, scales)
        if self._coming is None or start == 0:
            self._coming = torch.empty(self._rows_of_head, self._latent.rank, dtype=rows.dtype)
            self._num_come = 0
        begin = 0
        while begin < len(rows):
            head, first = divmod(start + begin, self._rows_of_head)
            assert first == self._num_come, "rows come in their order"
            num = min(self._rows_of_head - first, len(rows) - begin)
            self._coming[first : first + num].copy_(rows[begin : begin + num])
            begin += num
            self._num_come = (first + num) % self._rows_of_head
            if first + num == self._rows_of_head:
                self._keep(head, self._coming)

    def _keep(self, head: int, rows: Tensor) -> None:
        num_keys = self._latent.plain_dim
        self.keys[head].put(0, rows[:num_keys].T.contiguous())
        self.values[head].put(0, rows[num_keys:].contiguous())

    def _codes(self, codes: Codes, start: int = 0) -> None:
        self._put(codes.dequantized(), start)

    def _get(self, start: int = 0, stop: int | None = None) -> Tensor:
        num_rows = len(self.keys) * self._rows_of_head
        stop = num_rows if stop is None else min(stop, num_rows)
        first_head = start // self._rows_of_head
        last_head = -(-stop // self._rows_of_head)
        found = []
        for head in range(first_head, last_head):
            found += [self.keys[head].get(0).T, self.values[head].get(0)]
        begin = start - first_head * self._rows_of_head
        return torch.cat(found)[begin : begin + stop - start].contiguous()


class HeadRows:
    """A tensor with the matrices of all heads, one below the other."""

    def __init__(self, matrices: list[Matrix], num_rows: int, in_size: int) -> None:
        """`num_rows`: of a head."""
        self._matrices = matrices
        self._num_rows = num_rows
        self._in_size = in_size

    def weight(self, name: str) -> Weight:
        shape = (len(self._matrices) * self._num_rows, self._in_size)
        return Weight(name, shape, self._put, self._get, self._keep_as, self._put_codes)

    def _put(self, content: Tensor, start: int = 0, scales: Tensor | None = None) -> None:
        for matrix, rows, first in self._parts(len(content), start):
            matrix.put(0, content[rows], first, None if scales is None else scales[rows])

    def _keep_as(self, format: CodeFormat, order: Tensor | None = None) -> None:
        for matrix in self._matrices:
            matrix.keep_as(0, format, order)

    def _put_codes(self, codes: Codes, start: int = 0) -> None:
        for matrix, rows, first in self._parts(len(codes.values), start):
            matrix.put_codes(0, codes.of(rows), first)

    def _get(self, start: int = 0, stop: int | None = None) -> Tensor:
        num_rows = len(self._matrices) * self._num_rows
        stop = num_rows if stop is None else min(stop, num_rows)
        found = []
        for matrix, rows, first in self._parts(stop - start, start):
            found.append(matrix.get(0, first, first + rows.stop - rows.start))
        return torch.cat(found)

    def _parts(self, num: int, start: int) -> Iterator[tuple[Matrix, slice, int]]:
        """For each head that has some of rows start .. start + num: its matrix, which of these rows
        are the head's, and its own first one of them."""
        begin = 0
        while begin < num:
            head, first = divmod(start + begin, self._num_rows)
            end = min(begin + self._num_rows - first, num)
            yield self._matrices[head], slice(begin, end), first
            begin = end

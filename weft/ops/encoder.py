"""The operation that encoders need in addition to `Ops`: the sum of embeddings. In torch, on any
device; `cpp/encoder.py` records programs for the CPU kernels."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from weft.ops.plain import PlainOps
from weft.ops.protocol import LayerNorm, Matrix, Ops


class Tables(NamedTuple):
    """The embeddings whose sum is a token's vector; made by `Ops.matrix` as `precise`."""

    words: Matrix
    kinds: Matrix | None  # of segments
    positions: Matrix | None
    first_position: int  # row of position 0


class EncoderOps(Ops, Protocol):
    def embed_sum(
        self,
        tokens: Tensor,
        positions: Tensor,
        kinds: Tensor,
        tables: Tables,
        norm: LayerNorm | None,
    ) -> Tensor:
        """layer_norm(word + kind + position), of which only words must be there: each [T] ->
        [T, H]"""
        ...


class PlainEncoderOps(PlainOps):
    """`EncoderOps` in plain torch."""

    def embed_sum(
        self,
        tokens: Tensor,
        positions: Tensor,
        kinds: Tensor,
        tables: Tables,
        norm: LayerNorm | None,
    ) -> Tensor:
        x = self.embed(tokens, tables.words)
        if tables.kinds is not None:
            x = x + self.embed(kinds, tables.kinds)
        if tables.positions is not None:
            x = x + self.embed(positions + tables.first_position, tables.positions)
        return x if norm is None else self.layer_norm(x, norm)

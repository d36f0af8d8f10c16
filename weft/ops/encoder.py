"""The operation that encoders need in addition to `Ops`: the sum of three embeddings. In torch, on
any device; `cpp/encoder.py` records programs for the CPU kernels."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from weft.ops.plain import PlainOps
from weft.ops.protocol import LayerNorm, Matrix, Ops


class Tables(NamedTuple):
    """The three embeddings whose sum is a token's vector; made by `Ops.matrix` as `precise`."""

    words: Matrix
    kinds: Matrix  # of segments
    positions: Matrix
    first_position: int  # row of position 0


class EncoderOps(Ops, Protocol):
    def embed_sum(
        self, tokens: Tensor, positions: Tensor, kinds: Tensor, tables: Tables, norm: LayerNorm
    ) -> Tensor:
        """layer_norm(word + kind + position): each [T] -> [T, H]"""
        ...


class PlainEncoderOps(PlainOps):
    """`EncoderOps` in plain torch."""

    def embed_sum(
        self, tokens: Tensor, positions: Tensor, kinds: Tensor, tables: Tables, norm: LayerNorm
    ) -> Tensor:
        content = self.embed(tokens, tables.words) + self.embed(kinds, tables.kinds)
        return self.layer_norm(
            content + self.embed(positions + tables.first_position, tables.positions), norm
        )

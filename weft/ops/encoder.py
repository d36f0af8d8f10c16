"""The operations that encoders need in addition to `Ops`: the sum of embeddings, and limits of
numbers. In torch, on any device; `cpp/encoder.py` records programs for the CPU kernels."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.ops.elementwise import ACTIVATIONS
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

    def limit(self, x: Tensor, limits: Tensor, out: Tensor, activation: str = "") -> None:
        """Write activation(x limited to limits[0] .. limits[1]) into `out`, which may be x: both
        [T, n], tensors or slices of columns. `limits` [2] is part of an exact vector; the
        activation is one of `ACTIVATIONS`, or none."""
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

    def limit(self, x: Tensor, limits: Tensor, out: Tensor, activation: str = "") -> None:
        found = torch.minimum(torch.maximum(x.float(), limits[0]), limits[1]).to(x.dtype)
        out.copy_(ACTIVATIONS[activation](found) if activation else found)

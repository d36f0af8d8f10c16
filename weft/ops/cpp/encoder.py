"""`EncoderOps` by the CPU kernels."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from weft.ops import fusion
from weft.ops.cpp import abi
from weft.ops.cpp.abi import Epilogue, WeightFormat
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import EPILOGUES, CppOps, layer_norm_weights
from weft.ops.encoder import Tables
from weft.ops.fusion import Value
from weft.ops.plain import PlainMatrix
from weft.ops.protocol import LayerNorm, Matrix, Shard


class CppEncoderOps(CppOps):
    """Embeddings take part in no product, so they are stored as rows: in float32, or in bfloat16 if
    weights are bfloat16 or have eight bits or fewer."""

    def __init__(self, library: Library, format: WeightFormat) -> None:
        super().__init__(library, format)
        is_finer = format in (WeightFormat.F32, WeightFormat.I16)
        self._table_dtype = torch.float32 if is_finer else torch.bfloat16

    def matrix(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        *,
        bias: bool = False,
        gated: bool = False,
        precise: bool = False,
        shard: Shard | None = None,
    ) -> Matrix:
        if not precise:
            return super().matrix(
                in_size,
                sizes,
                bias=bias,
                gated=gated,
            )
        table = PlainMatrix(
            in_size,
            sizes,
            bias,
            self._table_dtype,
            torch.device("cpu"),
        )
        self.matrices.append(table)
        return table

    def embed_sum(
        self,
        tokens: Tensor,
        positions: Tensor,
        kinds: Tensor,
        tables: Tables,
        norm: LayerNorm | None,
    ) -> Tensor:
        """`EncoderOps.embed_sum`: a step brings its own tokens and positions; `kinds` is read at
        its present address."""
        words = cast(PlainMatrix, tables.words).weight
        out = self.recorder.buffer(words.shape[1])
        args = abi.EmbedSumArgs(
            words=words.data_ptr(),
            is_bf16=words.dtype == torch.bfloat16,
            kind_ids=kinds.data_ptr(),
            first_position=tables.first_position,
            size=words.shape[1],
            out=out.data_ptr(),
        )
        if tables.kinds is not None:
            args.kinds = cast(PlainMatrix, tables.kinds).weight.data_ptr()
        if tables.positions is not None:
            args.positions = cast(PlainMatrix, tables.positions).weight.data_ptr()
        if norm is not None:
            args.norm = layer_norm_weights(norm)
        self.recorder.add(args)
        return fusion.activation(Value(out))

    def limit(self, x: Tensor, limits: Tensor, out: Tensor, activation: str = "") -> None:
        """`EncoderOps.limit`: `limits` are read when the program runs."""
        args = abi.LimitArgs(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            size=x.shape[1],
            limits=limits.data_ptr(),
            activation=EPILOGUES[activation] if activation else Epilogue.STORE,
        )
        self.recorder.add(args)

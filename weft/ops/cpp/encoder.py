"""`EncoderOps` by the CPU kernels."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from weft.ops.cpp import abi
from weft.ops.cpp.abi import Epilogue, WeightFormat
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps, PackedMatrix
from weft.ops.encoder import LayerNorm, Tables
from weft.ops.plain import PlainMatrix
from weft.ops.protocol import Matrix

EPILOGUES = {
    "gelu": Epilogue.GELU,
    "gelu_new": Epilogue.GELU_TANH,
    "gelu_pytorch_tanh": Epilogue.GELU_TANH,
    "relu": Epilogue.RELU,
    "tanh": Epilogue.TANH,
}


class CppEncoderOps(CppOps):
    """Nothing is multiplied with the embeddings, so they are kept as rows: float32, or bfloat16 where weights have
    fewer bits."""

    def __init__(self, library: Library, format: WeightFormat) -> None:
        super().__init__(library, format)
        self._table_dtype = torch.float32 if format == WeightFormat.F32 else torch.bfloat16

    def matrix(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        *,
        bias: bool = False,
        gated: bool = False,
        precise: bool = False,
    ) -> Matrix:
        if not precise:
            return super().matrix(in_size, sizes, bias=bias, gated=gated)
        table = PlainMatrix(in_size, sizes, bias, self._table_dtype, torch.device("cpu"))
        self.tensors += table.tensors
        return table

    def embed_sum(
        self, tokens: Tensor, positions: Tensor, kinds: Tensor, tables: Tables, norm: LayerNorm
    ) -> Tensor:
        """Tokens and positions are the step's; `kinds` is read where it stands."""
        words, of_kinds, of_positions = (cast(PlainMatrix, one).weight for one in tables[:3])
        out = self.recorder.buffer(words.shape[1])
        self.recorder.add(
            abi.EmbedSumArgs(
                words=words.data_ptr(),
                kinds=of_kinds.data_ptr(),
                positions=of_positions.data_ptr(),
                is_bf16=words.dtype == torch.bfloat16,
                kind_ids=kinds.data_ptr(),
                first_position=tables.first_position,
                size=words.shape[1],
                norm=_weights(norm),
                out=out.data_ptr(),
            )
        )
        return out

    def layer_norm(self, x: Tensor, norm: LayerNorm) -> Tensor:
        out = self.recorder.buffer(x.shape[1])
        self.recorder.add(
            abi.LayerNormArgs(
                x=x.data_ptr(),
                out=out.data_ptr(),
                size=x.shape[1],
                x_stride=x.stride(0),
                out_stride=out.stride(0),
                norm=_weights(norm),
            )
        )
        return out

    def activated(self, x: Tensor, weight: Matrix, activation: str) -> Tensor:
        packed = cast(PackedMatrix, weight)
        y = self.recorder.buffer(packed.out_size)
        self._linear(x, packed, None, y, EPILOGUES[activation])
        return y


def _weights(norm: LayerNorm) -> abi.LayerNormWeights:
    return abi.LayerNormWeights(norm.weight.data_ptr(), norm.bias.data_ptr(), norm.eps)

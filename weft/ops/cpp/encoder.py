"""`EncoderOps` by the CPU kernels."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from weft.ops import fusion
from weft.ops.cpp import abi
from weft.ops.cpp.abi import Epilogue, WeightFormat
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps, PackedMatrix
from weft.ops.encoder import LayerNorm, Tables
from weft.ops.fusion import Value, source_of, tensor_of
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
    """Nothing is multiplied with the embeddings, so they are kept as rows: float32, or bfloat16
    where weights have fewer bits."""

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
        self._matrices.append(table)
        return table

    def embed_sum(
        self, tokens: Tensor, positions: Tensor, kinds: Tensor, tables: Tables, norm: LayerNorm
    ) -> Tensor:
        """Tokens and positions are the step's; `kinds` is read where it stands."""
        words = cast(PlainMatrix, tables.words).weight
        of_kinds = cast(PlainMatrix, tables.kinds).weight
        of_positions = cast(PlainMatrix, tables.positions).weight
        out = self.recorder.buffer(words.shape[1])
        args = abi.EmbedSumArgs(
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
        self.recorder.add(args)
        return fusion.activation(Value(out))

    def layer_norm(self, x: Tensor, norm: LayerNorm) -> Tensor:
        source = tensor_of(x)
        size = source.shape[1]
        out = self.recorder.buffer(size)
        args = abi.LayerNormArgs(
            x=source.data_ptr(),
            out=out.data_ptr(),
            size=size,
            x_stride=source.stride(0),
            out_stride=out.stride(0),
            norm=_weights(norm),
        )
        self.recorder.add(args)
        return fusion.activation(Value(out))

    def activated(
        self,
        x: Tensor,
        weight: Matrix,
        activation: str,
    ) -> Tensor:
        packed = cast(PackedMatrix, weight)
        y = self.recorder.buffer(packed.out_size)
        self.record_linear(
            source_of(x),
            packed,
            y,
            EPILOGUES[activation],
        )
        return fusion.activation(Value(y))


def _weights(norm: LayerNorm) -> abi.LayerNormWeights:
    return abi.LayerNormWeights(norm.weight.data_ptr(), norm.bias.data_ptr(), norm.eps)

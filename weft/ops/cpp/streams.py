"""`StreamOps` by the CPU kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from weft.ops.cpp import abi
from weft.ops.cpp.abi import Epilogue
from weft.ops.cpp.matrices import PackedMatrix
from weft.ops.cpp.program import ProgramRecorder
from weft.ops.fusion import Source
from weft.ops.placement import local_matrix
from weft.ops.protocol import Matrix, Norm, StreamRouter


class Recording(Protocol):
    """What these operations need of `CppOps`."""

    @property
    def recorder(self) -> ProgramRecorder: ...

    def record_linear(
        self,
        source: Source,
        packed: PackedMatrix,
        y: Tensor,
        epilogue: Epilogue,
    ) -> None: ...


class CppStreams:
    def __init__(self, ops: Recording, activations: Mapping[str, Epilogue]) -> None:
        self._ops = ops
        self._activations = activations

    def open(self, x: Tensor, others: Tensor) -> Tensor:
        size = x.shape[1]
        num = 1 + others.shape[1] // size
        out = self._ops.recorder.buffer(num * size)
        args = abi.OpenStreamsArgs(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            y=others.data_ptr(),
            y_stride=others.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            num=num,
            size=size,
        )
        self._ops.recorder.add(args)
        return out

    def factors(self, x: Tensor, router: StreamRouter, weight: Matrix) -> Tensor:
        recorder = self._ops.recorder
        few = recorder.buffer(_packed(router.weight).out_size)
        source = Source(x, router.norm)
        self._ops.record_linear(source, _packed(router.weight), few, Epilogue.TANH)
        found = recorder.buffer(_packed(weight).out_size)
        self._ops.record_linear(Source(few, None), _packed(weight), found, Epilogue.STORE)
        return found

    def predict(self, x: Tensor, factors: Tensor) -> Tensor:
        num = int(factors.shape[1] ** 0.5)
        out = self._ops.recorder.buffer(x.shape[1])
        args = abi.PredictStreamsArgs(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            factors=factors.data_ptr(),
            factors_stride=factors.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            num=num,
            size=x.shape[1] // num,
        )
        self._ops.recorder.add(args)
        return out

    def correct(self, x: Tensor, y: Tensor, factors: Tensor, active: int) -> None:
        args = abi.CorrectStreamsArgs(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            y=y.data_ptr(),
            y_stride=y.stride(0),
            factors=factors.data_ptr(),
            factors_stride=factors.stride(0),
            num=factors.shape[1],
            size=y.shape[1],
            active=active,
        )
        self._ops.recorder.add(args)

    def add_normed(self, x: Tensor, y: Tensor, norm: Norm) -> None:
        size = y.shape[1]
        for first in range(size, x.shape[1], size):
            args = abi.NormArgs(
                x=y.data_ptr(),
                weight=norm.weight.data_ptr(),
                out=x[:, first:].data_ptr(),
                size=size,
                x_stride=y.stride(0),
                out_stride=x.stride(0),
                eps=norm.eps,
                add_scale=1.0,
            )
            self._ops.recorder.add(args)

    def close(self, x: Tensor, others: Tensor) -> Tensor:
        size = x.shape[1]
        out = self._ops.recorder.buffer(size)
        args = abi.CloseStreamsArgs(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            y=others.data_ptr(),
            y_stride=others.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            num=1 + others.shape[1] // size,
            size=size,
        )
        self._ops.recorder.add(args)
        return out

    def cut_off(self, x: Tensor, deviations: float, activation: str) -> Tensor:
        args = abi.CutOffArgs(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            size=x.shape[1],
            deviations=deviations,
            activation=self._activations[activation],
        )
        self._ops.recorder.add(args)
        return x


def _packed(matrix: Matrix) -> PackedMatrix:
    found = local_matrix(matrix)
    assert isinstance(found, PackedMatrix)
    return found

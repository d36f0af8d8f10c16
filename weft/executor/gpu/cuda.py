"""CUDA through torch: one stream, pinned memory, events and graphs.

This is the only file of the GPU code that needs a GPU to be tested; tests run all others with a
`Gpu` that computes on the CPU. So this module makes no decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from weft.executor.gpu.gpu import GpuEvent, GpuGraph

T = TypeVar("T")
cuda: Any = torch.cuda


class Cuda:
    """The first GPU that this process may use, as a `Gpu`."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self._stream: Any = cuda.Stream(self.device)
        self._pool: Any = None

    def stream(self) -> AbstractContextManager[object]:
        return cast(AbstractContextManager[object], cuda.stream(self._stream))

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(
            shape,
            dtype=dtype,
            pin_memory=True,
        )

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def record(self) -> GpuEvent:
        event: Any = cuda.Event()
        event.record(self._stream)
        return cast(GpuEvent, event)

    def capture(self, work: Callable[[], T]) -> tuple[GpuGraph, T]:
        graph: Any = cuda.CUDAGraph()
        # "thread_local": other threads may call CUDA in the meantime, for example to pin memory.
        capturing = cuda.graph(
            graph,
            pool=self._pool,
            stream=self._stream,
            capture_error_mode="thread_local",
        )
        with capturing:
            result = work()
        self._pool = graph.pool()
        return cast(GpuGraph, graph), result

    def synchronize(self) -> None:
        cuda.synchronize(self.device)

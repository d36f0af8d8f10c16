"""The functions of CUDA that a runner needs, as a seam.

`cuda.py` is the real one. The tests have one that computes on the CPU and notices when memory is
touched too early.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class GpuEvent(Protocol):
    """A place in the stream."""

    def query(self) -> bool:
        """Whether the stream has passed the place."""
        ...

    def synchronize(self) -> None:
        """Wait until the stream has passed the place."""
        ...


class GpuGraph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Put all captured work on the stream, with the same addresses."""
        ...


class Gpu(Protocol):
    """One GPU with one stream: it does its work in the order in which it gets it."""

    device: torch.device

    def stream(self) -> AbstractContextManager[object]:
        """Inside, torch's work of this thread goes to our stream."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the host that the GPU can reach while the host does other work. Its content is
        undefined."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between pinned memory and the GPU, in stream order. The caller must leave the source
        as it is until then."""
        ...

    def record(self) -> GpuEvent:
        """The place behind all work on the stream."""
        ...

    def capture(self, work: Callable[[], T]) -> tuple[GpuGraph, T]:
        """Record what `work` puts on the stream instead of doing it; returns its result, too.

        The work must have run once before: while it is recorded, nothing may be compiled and
        nothing waited for. All graphs share the memory of their intermediate tensors: a replay of
        one overwrites those of the others, except for the tensors that `work` returns.
        """
        ...

    def synchronize(self) -> None:
        """Wait for all work on every stream."""
        ...

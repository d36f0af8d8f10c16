"""The functions of CUDA that a runner needs, as a protocol.

`cuda.py` is the real implementation. The tests have one that computes on the CPU and detects access
to memory that comes too early.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class GpuEvent(Protocol):
    """A point in the stream."""

    def query(self) -> bool:
        """Whether the stream has passed this point."""
        ...

    def synchronize(self) -> None:
        """Wait until the stream has passed this point."""
        ...


class GpuGraph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Put all captured work on the stream, with the same addresses."""
        ...


class Gpu(Protocol):
    """One GPU with one stream: it executes work in the order in which it was submitted."""

    device: torch.device

    def stream(self) -> AbstractContextManager[object]:
        """Inside, torch's work of this thread goes to our stream."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory that the GPU can access while the host does other work. Its content is
        undefined."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between pinned memory and the GPU, in stream order. The source must not change until
        then."""
        ...

    def record(self) -> GpuEvent:
        """The point after all work on the stream."""
        ...

    def capture(self, work: Callable[[], T]) -> tuple[GpuGraph, T]:
        """Record the work of `work` on the stream instead of executing it; also returns its result.

        The work must have run once before, because nothing may be compiled or waited for during
        recording. All graphs share the memory of their intermediate tensors: a replay of one
        overwrites those of the others, except for the tensors that `work` returns.
        """
        ...

    def synchronize(self) -> None:
        """Wait for all work on every stream."""
        ...

"""The little of CUDA that a runner needs, as a seam: `cuda.py` is the real one, the tests have one that computes on the
CPU and notices when memory is touched too early."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Event(Protocol):
    """A place in the stream."""

    def query(self) -> bool:
        """Whether the stream has come so far."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...


class Graph(Protocol):
    def replay(self) -> None:
        """Give the stream all that was captured, with the same addresses."""
        ...


class Gpu(Protocol):
    """One GPU with one stream: what it is given is done in that order."""

    device: torch.device

    def stream(self) -> AbstractContextManager[object]:
        """What torch computes on this thread inside goes to our stream."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the host that the GPU can reach while the host does something else. Its content is anything."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between pinned memory and the GPU, in its turn. The source must stay as it is until then."""
        ...

    def record(self) -> Event:
        """The place behind all that the stream was given so far."""
        ...

    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        """Record what `work` gives the stream instead of doing it. It must have run before in earnest: nothing may be
        compiled, and nothing waited for, while it is recorded. All graphs share memory for what is in between: what one
        returns is good until the next is replayed, except for what it returns."""
        ...

    def synchronize(self) -> None:
        """Wait for everything, on every stream."""
        ...

"""A GPU that is played, with the kernels of Triton in its interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.executor.fake_gpu import FakeGpu
from tests.ops_triton.interpreter import is_recent, make_quick
from weft.executor.gpu import build

if is_recent():
    make_quick()


class Again:
    """A graph that does the work again: an interpreter launches no kernels that could be
    recorded."""

    def __init__(self, gpu: FakeGpu, work: Callable[[], Any], result: Any) -> None:
        self._gpu = gpu
        self._work = work
        self._result = result

    def replay(self) -> None:
        self._gpu.num_replays += 1
        for old, new in zip(self._result, self._work(), strict=True):
            old.copy_(new)


class RepeatingGpu(FakeGpu):
    def capture(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        result = work()
        self.sizes.append(len(result[-1]))
        return Again(self, work, result), result


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = RepeatingGpu()
    monkeypatch.setattr(build, "find_gpu", lambda: gpu)
    return gpu

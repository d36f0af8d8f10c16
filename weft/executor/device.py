"""What a runner asks of its device: where and when a step is computed, and how its result comes back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from torch import Tensor

from weft.plan.step import Plan, Result, Step

T = TypeVar("T")


class Outcome(Protocol):
    """What a step has computed, in tensors where it was computed."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> Outcome:
        """The same with each of its tensors moved."""
        ...

    def result(self) -> Result:
        """As the scheduler wants it. Waits for the device, if the tensors are there."""
        ...


class Device(Protocol):
    """Steps are computed in the order in which they are launched."""

    def launch(self, run: Callable[[Plan], Outcome], plan: Plan) -> Step:
        """Begin `run(plan)`. What it raises, the step's `result` raises."""
        ...

    def apart(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` where steps are computed, behind those that are launched and before any other."""
        ...

    def between(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` on a thread of its own, with everything that it gives the device. No step is in flight, and none
        is launched before it is done."""
        ...

    def close(self) -> None:
        """Finish what is launched."""
        ...

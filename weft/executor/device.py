"""What a runner asks of its device: on which thread a step is computed, and how its result comes
back.

Knows neither models nor plans: a step is a function to call, and its output a few tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from torch import Tensor

from weft.plan.step import Plan, Result, Step

T = TypeVar("T")


class DeviceOutput(Protocol):
    """What a step has computed, in tensors on the device that computed it."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> DeviceOutput:
        """The same output, with `move` applied to each of its tensors."""
        ...

    def result(self) -> Result:
        """The output as the scheduler reads it. Waits for the device if the tensors are there."""
        ...


class StepDevice(Protocol):
    """Computes steps in the order in which they are launched."""

    def launch(self, run: Callable[[Plan], DeviceOutput], plan: Plan) -> Step:
        """Begin `run(plan)`. If that raises, the step's `result` raises the same."""
        ...

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` on the thread that computes steps, after the launched steps and before any
        other."""
        ...

    def run_exclusive(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` on a thread of its own, and wait there for everything that it asks of the
        device. No step is in flight, and the caller launches none before the work is done."""
        ...

    def close(self) -> None:
        """Finish the launched steps."""
        ...


def do_here(work: Callable[[], T]) -> Future[T]:
    """Do `work` in the thread that calls. If it raises, the future's `result` raises the same."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as exc:
        future.set_exception(exc)
    return future

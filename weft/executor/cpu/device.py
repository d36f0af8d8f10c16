"""The CPU as a device: the thread on which a step is computed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

from weft.executor.device import DeviceOutput, do_here
from weft.plan.step import Plan, Result, Step

T = TypeVar("T")


class CpuDevice:
    """The `StepDevice` that computes on `thread`, an executor with one thread."""

    def __init__(self, thread: Executor) -> None:
        self._thread = thread

    def launch(self, run: Callable[[Plan], DeviceOutput], plan: Plan) -> Step:
        return self._thread.submit(_result, run, plan)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        return self._thread.submit(work)

    def run_exclusive(self, work: Callable[[], T]) -> Future[T]:
        return self._thread.submit(work)

    def close(self) -> None:
        self._thread.shutdown()


class InlineCpuDevice:
    """The `StepDevice` that computes a step in the thread that launches it; other work is done on
    `thread`.

    Passing a step to another thread and being woken by it takes a tenth of a millisecond. This
    device saves that time for steps that are not planned ahead and are computed by our own kernels,
    which have one team of threads for all calling threads and do not change the settings of the
    calling thread.
    """

    def __init__(self, thread: Executor) -> None:
        self._thread = thread

    def launch(self, run: Callable[[Plan], DeviceOutput], plan: Plan) -> Step:
        step: Future[Result] = Future()
        try:
            step.set_result(run(plan).result())
        except Exception as exc:
            # As with another thread: the loop gets the exception when it reads the result.
            step.set_exception(exc)
        return step

    def submit(self, work: Callable[[], T]) -> Future[T]:
        return do_here(work)

    def run_exclusive(self, work: Callable[[], T]) -> Future[T]:
        return self._thread.submit(work)

    def close(self) -> None:
        self._thread.shutdown()


def _result(run: Callable[[Plan], DeviceOutput], plan: Plan) -> Result:
    return run(plan).result()

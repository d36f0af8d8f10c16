"""The interface of a runner to its device: the thread that computes a step, and the return of its
result.

It knows neither models nor plans: a step is a function to call, and its output a few tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from weft.plan.step import Plan, Result, Step

T = TypeVar("T")


class DeviceOutput(Protocol):
    """The output of a step, in tensors on the device that computed it."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> DeviceOutput:
        """The same output, with `move` applied to each of its tensors."""
        ...

    def result(self) -> Result:
        """The output for the scheduler. Waits for the device if the tensors are on one."""
        ...


class HostResult(NamedTuple):
    """The `DeviceOutput` of a step whose result is on the host."""

    value: Result

    def moved(self, move: Callable[[Tensor], Tensor]) -> HostResult:
        return self

    def result(self) -> Result:
        return self.value


class StepDevice(Protocol):
    """Computes steps in the order in which they are launched."""

    def launch(self, run: Callable[[Plan], DeviceOutput], plan: Plan) -> Step:
        """Begin `run(plan)`. If it raises, the step's `result` raises the same exception."""
        ...

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the thread that computes steps, after the launched steps and before any
        other."""
        ...

    def run_exclusive(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on a thread of its own, which waits for all its work on the device. No step is
        in flight, and the caller launches none before the work is done."""
        ...

    def close(self) -> None:
        """Finish the launched steps."""
        ...


def do_here(work: Callable[[], T]) -> Future[T]:
    """Run `work` in the calling thread. If it raises, the future's `result` raises the same."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as exc:
        future.set_exception(exc)
    return future


def worker_thread(num_threads: int) -> ThreadPoolExecutor:
    """An executor with one thread, on which torch computes with `num_threads` threads.

    0 leaves the number to torch. The steps of a runner must all run on one such thread: OpenMP has
    a team of threads for each thread that calls it, and two teams on the same cores wait for each
    other.
    """
    return ThreadPoolExecutor(
        1,
        thread_name_prefix="weft-runner",
        initializer=_set_up,
        initargs=(num_threads,),
    )


def _set_up(num_threads: int) -> None:
    if num_threads:
        torch.set_num_threads(num_threads)
    # Arithmetic on denormal numbers costs a hundred cycles each.
    torch.set_flush_denormal(True)

"""The CPU as a device: which thread computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

from weft.executor.device import Outcome
from weft.plan.step import Plan, Result, Step

P = ParamSpec("P")
T = TypeVar("T")


class Cpu:
    """The `Device` that computes on `thread` (of which there is one), steps where `steps` says, if it does."""

    def __init__(self, thread: Executor, steps: Executor | None = None) -> None:
        self._thread = thread
        self._steps = thread if steps is None else steps

    def launch(self, run: Callable[[Plan], Outcome], plan: Plan) -> Step:
        return self._steps.submit(_result, run, plan)

    def apart(self, work: Callable[[], T]) -> Future[T]:
        return self._steps.submit(work)

    def between(self, work: Callable[[], T]) -> Future[T]:
        return self._thread.submit(work)

    def close(self) -> None:
        self._thread.shutdown()


def _result(run: Callable[[Plan], Outcome], plan: Plan) -> Result:
    return run(plan).result()


def worker_thread(num_threads: int) -> ThreadPoolExecutor:
    """A pool of one thread on which torch works with `num_threads` threads (0: torch's own choice).

    All of a runner's torch calls belong there: OpenMP keeps a team of threads for each thread that calls it, and two
    teams on the same cores wait for each other.
    """
    return ThreadPoolExecutor(
        1, thread_name_prefix="weft-runner", initializer=_set_up, initargs=(num_threads,)
    )


class CallersThread(Executor):
    """Computes in the thread that submits, which then waits for nothing: handing a step to another thread and being
    woken by it costs a tenth of a millisecond. For steps that are not planned ahead, with our own kernels: these have
    one team of threads, whoever calls, and leave the caller's thread as they find it."""

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as exc:
            future.set_exception(exc)
        return future


def _set_up(num_threads: int) -> None:
    if num_threads:
        torch.set_num_threads(num_threads)
    torch.set_flush_denormal(True)  # tiny numbers would cost a hundred cycles each

"""A GPU as a `Device`: a step is given to its stream in the thread that launches it, which does not wait.

    launch n      copy in · compute · copy out · event n
    launch n + 1                                          copy in · compute · ...
    result n      wait for event n, read pinned memory

Nothing is waited for but the event behind a step's own result, so the next step is on its way to the device while this
one runs there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

from torch import Tensor

from weft.executor.cpu.device import CallersThread
from weft.executor.device import Outcome
from weft.executor.gpu.gpu import Event, Gpu
from weft.plan.step import Plan, Result, Step

T = TypeVar("T")


class InFlight:
    """A step whose result is on its way to pinned memory."""

    def __init__(self, outcome: Outcome, arrived: Event) -> None:
        self._outcome = outcome
        self._arrived = arrived

    def done(self) -> bool:
        return self._arrived.query()

    def result(self) -> Result:
        self._arrived.synchronize()
        return self._outcome.result()


class GpuStream:
    """`thread` is for what is done between steps."""

    def __init__(self, gpu: Gpu, thread: Executor) -> None:
        self._gpu = gpu
        self._thread = thread
        self._here = CallersThread()

    def launch(self, run: Callable[[Plan], Outcome], plan: Plan) -> Step:
        try:
            with self._gpu.stream():
                outcome = run(plan).moved(self._to_host)
                return InFlight(outcome, self._gpu.record())
        except Exception as exc:
            failed: Future[Result] = Future()
            failed.set_exception(exc)
            return failed

    def apart(self, work: Callable[[], T]) -> Future[T]:
        return self._here.submit(work)

    def between(self, work: Callable[[], T]) -> Future[T]:
        return self._thread.submit(self._alone, work)

    def close(self) -> None:
        self._gpu.synchronize()
        self._thread.shutdown()

    def _alone(self, work: Callable[[], T]) -> T:
        """Weights may come over streams of others: they are to be there before the next step."""
        with self._gpu.stream():
            try:
                return work()
            finally:
                self._gpu.synchronize()

    def _to_host(self, tensor: Tensor) -> Tensor:
        target = self._gpu.pinned(tuple(tensor.shape), tensor.dtype)
        self._gpu.copy(target, tensor)
        return target

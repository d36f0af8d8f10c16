"""A GPU as a `StepDevice`: the thread that launches a step puts it on the stream and does not wait.

    launch n      copy in · compute · copy out · event n
    launch n + 1                                          copy in · compute · ...
    result n      wait for event n, read pinned memory

A result waits only for the event after its own step, so the next step can be copied and launched
while this one runs on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

from torch import Tensor

from weft.executor.device import DeviceOutput, do_here
from weft.executor.gpu.gpu import Gpu, GpuEvent
from weft.plan.step import Plan, Result, Step

T = TypeVar("T")


class StepInFlight:
    """A step whose result is being copied to pinned memory."""

    def __init__(self, output: DeviceOutput, arrived: GpuEvent) -> None:
        self._output = output
        self._arrived = arrived

    def done(self) -> bool:
        return self._arrived.query()

    def result(self) -> Result:
        self._arrived.synchronize()
        return self._output.result()


class GpuDevice:
    """The `StepDevice` of one GPU. `thread` does the work that runs between steps."""

    def __init__(self, gpu: Gpu, thread: Executor) -> None:
        self._gpu = gpu
        self._thread = thread

    def launch(self, run: Callable[[Plan], DeviceOutput], plan: Plan) -> Step:
        try:
            with self._gpu.stream():
                output = run(plan).moved(self._to_host)
                return StepInFlight(output, self._gpu.record())
        except Exception as exc:
            # As with a failed step: the loop gets the exception when it reads the result.
            failed: Future[Result] = Future()
            failed.set_exception(exc)
            return failed

    def submit(self, work: Callable[[], T]) -> Future[T]:
        return do_here(work)

    def run_exclusive(self, work: Callable[[], T]) -> Future[T]:
        return self._thread.submit(self._synchronized, work)

    def close(self) -> None:
        self._gpu.synchronize()
        self._thread.shutdown()

    def _synchronized(self, work: Callable[[], T]) -> T:
        """Run `work` and wait for all streams, because a process group sends weights over its
        own."""
        with self._gpu.stream():
            try:
                return work()
            finally:
                self._gpu.synchronize()

    def _to_host(self, tensor: Tensor) -> Tensor:
        # New memory each time instead of a ring, because results of several steps may be unread.
        target = self._gpu.pinned(tuple(tensor.shape), tensor.dtype)
        self._gpu.copy(target, tensor)
        return target

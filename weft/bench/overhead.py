"""Common parts of the scheduler benchmarks: a step without a device, random requests, and figures
with a goal."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.plan.device import NO_DEVICE, DeviceRequest, Pending
from weft.plan.step import Plan, Result, Step
from weft.scheduler.batch import Batch
from weft.scheduler.scheduler import Scheduler

VOCAB_SIZE = 150_000
MS = 1e3  # units per second
US = 1e6


class OverheadFigure(NamedTuple):
    """Median and spread over the samples of one operation, and the goal."""

    name: str
    unit: str
    median: float
    p5: float
    p95: float
    goal: float

    @property
    def is_met(self) -> bool:
        return self.median <= self.goal

    @classmethod
    def of(
        cls, name: str, unit: str, scale: float, samples: Sequence[float], goal: float
    ) -> OverheadFigure:
        """`scale`: units per second, or per byte."""
        scaled = np.percentile(samples, (5, 50, 95)) * scale
        p5, median, p95 = scaled.tolist()
        return cls(name, unit, median, p5, p95, goal)


class NoRunner:
    """For a scheduler whose steps are committed by hand."""

    def launch(self, plan: Plan) -> Step:
        raise AssertionError("no step is launched here")

    def control(self, request: DeviceRequest) -> Pending:
        return NO_DEVICE


def timed_step(scheduler: Scheduler) -> tuple[float, Batch]:
    """Plan and commit a step. Returns the seconds of both, without the device's part between them,
    and the batch."""
    began = time.perf_counter()
    batch = scheduler.get_next_batch_to_run(0.0, in_flight=False)
    planned = time.perf_counter()
    assert batch is not None
    num_samples = len(batch.sample_rows)
    result = Result(tokens=np.full(num_samples, 5, dtype=np.int32))
    resumed = time.perf_counter()
    scheduler.process_batch_result(batch, result)
    ended = time.perf_counter()
    return planned - began + ended - resumed, batch


def seconds_of(operation: Callable[[], object]) -> float:
    began = time.perf_counter()
    operation()
    return time.perf_counter() - began


def settle() -> None:
    """Exclude existing objects from later garbage collections, as the engine does when it is
    ready."""
    gc.collect()
    gc.freeze()


def message_of(number: int, packed: bytes, *, max_new: int) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=max_new, ignore_eos=True)
    return GenerateRequest(
        id=number,
        rid=str(number),
        input_ids=packed,
        sampling=sampling,
    )


def draw_ids(rng: np.random.Generator, length: int) -> bytes:
    ids = rng.integers(2, VOCAB_SIZE, length, dtype=np.int32)
    return ids.tobytes()

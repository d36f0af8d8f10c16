"""Measures the steps of a real runner: what each had to do, and how long it took. The cost model is fitted to these.

A step is taken to run from its launch, or from the end of the one before if that is later, until its result is there.
That is exact as long as somebody waits for the result, which the loop does while the device is the bottleneck.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterable
from typing import NamedTuple

from weft.plan.device import DeviceRequest, Pending
from weft.plan.step import Plan, Result, Runner, Step
from weft.sim.cost import Load, Meter


class StepTime(NamedTuple):
    """One step: its load, and the seconds it took."""

    num_tokens: int
    context: int
    num_samples: int
    seconds: float


class MeasuredStep:
    def __init__(self, runner: MeasuredRunner, step: Step, load: Load, launched_s: float) -> None:
        self._runner = runner
        self._step = step
        self._load = load
        self._launched_s = launched_s

    def result(self) -> Result:
        result = self._step.result()
        self._runner.note(self._load, self._launched_s)
        return result

    def done(self) -> bool:
        return self._step.done()


class MeasuredRunner:
    """Hands plans on to another runner."""

    def __init__(self, runner: Runner) -> None:
        self.meter = Meter()
        self.steps: list[StepTime] = []
        self._runner = runner
        self._last_end_s = 0.0

    def launch(self, plan: Plan) -> MeasuredStep:
        launched_s = time.perf_counter()  # before: a runner may compute at once
        return MeasuredStep(self, self._runner.launch(plan), Load.of(plan), launched_s)

    def control(self, request: DeviceRequest) -> Pending:
        return self._runner.control(request)

    def note(self, load: Load, launched_s: float) -> None:
        now = time.perf_counter()
        seconds = now - max(launched_s, self._last_end_s)
        self._last_end_s = now
        self.meter.add(load, seconds)
        self.steps.append(StepTime(load.num_tokens, load.context, load.num_samples, seconds))


class RealClock:
    """Seconds of this machine."""

    def __call__(self) -> float:
        return time.perf_counter()

    def wait_until(self, time_s: float) -> None:
        time.sleep(max(0.0, time_s - time.perf_counter()))


def write_steps(name: str, steps: Iterable[StepTime]) -> None:
    """Write a CSV file with a line for each step."""
    with open(name, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(StepTime._fields)
        writer.writerows((*step[:3], f"{step.seconds:.9f}") for step in steps)


def read_steps(name: str) -> list[StepTime]:
    """Read what `write_steps` wrote; a file without num_samples has none. Raises ValueError for any other file."""
    with open(name, encoding="utf-8", newline="") as file:
        try:
            return [
                StepTime(
                    int(line["num_tokens"]),
                    int(line["context"]),
                    int(line.get("num_samples", 0)),
                    float(line["seconds"]),
                )
                for line in csv.DictReader(file)
            ]
        except (KeyError, TypeError, ValueError) as exc:
            raise ValueError(
                f"{name} has no columns num_tokens, context, seconds with numbers: {exc}"
            ) from exc

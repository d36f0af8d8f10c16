"""Steps of a CPU that are planned before the drafts of the previous step are compared: the part of
them that counts is decided when a step begins (`plan/runs.py`)."""

from __future__ import annotations

from weft.executor.device import DeviceOutput
from weft.executor.inputs import DeviceRowTable
from weft.executor.runner import ModelSteps, TorchRunner
from weft.plan.runs import HostRuns, has_runs
from weft.plan.step import Plan


class ClosingSteps:
    """The `ModelSteps` for such plans on a CPU."""

    def __init__(self, otherwise: ModelSteps, rows: DeviceRowTable) -> None:
        self._otherwise = otherwise
        self._rows = rows
        self._runs = HostRuns()

    def run(self, plan: Plan) -> DeviceOutput:
        if not has_runs(plan):
            return self._otherwise.run(plan)
        closed = self._runs.closed(plan)
        output = self._otherwise.run(closed)
        sampled = output.result().tokens
        for row, token in self._runs.settle(plan, closed, sampled):
            self._rows.last_tokens[row] = token
        return output


def closing(runner: TorchRunner, rows: DeviceRowTable) -> TorchRunner:
    """The runner, extended for such plans."""
    steps, store, device = runner.parts
    return TorchRunner(
        ClosingSteps(steps, rows),
        store=store,
        device=device,
        kernels=runner.kernels,
    )

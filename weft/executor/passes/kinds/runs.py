"""Steps of a CPU that are planned before the drafts of the previous step are compared: the part of
them that counts is decided when a step begins (`plan/runs.py`)."""

from __future__ import annotations

from weft.executor.device import DeviceOutput
from weft.executor.inputs import DeviceRowTable
from weft.executor.passes.kinds import PassParts
from weft.executor.runner import Pass, Run
from weft.plan.runs import HostRuns, has_runs
from weft.plan.step import Plan


class RunsPass(Pass):
    name = "runs of drafts"

    def __init__(self, rows: DeviceRowTable) -> None:
        self._rows = rows
        self._runs = HostRuns()

    def run(self, plan: Plan, then: Run) -> DeviceOutput:
        if not has_runs(plan):
            return then(plan)
        closed = self._runs.closed(plan)
        output = then(closed)
        sampled = output.result().tokens
        for row, token in self._runs.settle(plan, closed, sampled):
            self._rows.last_tokens[row] = token
        return output


def runs_pass(parts: PassParts) -> RunsPass | None:
    """The pass for a CPU whose steps with drafts are planned ahead."""
    if parts.host_rows is None or not parts.engine.keeps_runs:
        return None
    return RunsPass(parts.host_rows)


PASS = runs_pass

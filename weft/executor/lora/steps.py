"""Steps of requests that may have adapters."""

from __future__ import annotations

from weft.executor.device import DeviceOutput
from weft.executor.lora.table import AdapterTable
from weft.executor.runner import ModelSteps
from weft.plan.step import Plan


class AdapterSteps:
    """The `ModelSteps` of a model whose requests may have adapters."""

    def __init__(self, steps: ModelSteps, table: AdapterTable) -> None:
        self._steps = steps
        self._table = table

    def run(self, plan: Plan) -> DeviceOutput:
        self._table.begin(plan)
        return self._steps.run(plan)

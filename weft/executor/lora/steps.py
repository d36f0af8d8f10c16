"""Steps of requests that may have adapters."""

from __future__ import annotations

from weft.executor.device import DeviceOutput
from weft.executor.lora.table import AdapterTable
from weft.executor.runner import Pass, Run
from weft.plan.step import Plan


class AdapterPass(Pass):
    """Says which adapter each token of a step has, before it is computed."""

    name = "adapters"

    def __init__(self, table: AdapterTable) -> None:
        self._table = table

    def run(self, plan: Plan, then: Run) -> DeviceOutput:
        self._table.begin(plan)
        return then(plan)

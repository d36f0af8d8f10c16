"""Logit processors: which requests call which processors, and the tokens that each call gets.

A processor sees the whole output, so no step is planned after a step that calls one until its
result is known. `ProcessorChecks`, outside of the core, decides whether a request may use the
processors that it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from weft.arrays import IntArray
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import Processor
from weft.plan.logits import ProcessorCall
from weft.scheduler.batch import Batch, SampledRows
from weft.scheduler.feature import Feature, StepInputs
from weft.scheduler.limits import Refusal
from weft.scheduler.request import Columns, Request


class ProcessorChecks(Protocol):
    """Checks whether requests may use the logit processors that they name.

    Implemented by `executor/logit_processors/processors.py`.
    """

    def wrong(self, name: str, params: Mapping[str, Any]) -> str:
        """Why a request may not use this processor with these parameters; "" if it may."""
        ...


class ProcessorsFeature(Feature):
    """Keeps the processors of each row, in their order."""

    sampling_fields = ("processors",)

    def __init__(self, checks: ProcessorChecks) -> None:
        self._checks = checks
        self._by_row: dict[int, tuple[Processor, ...]] = {}

    def refusal(self, message: GenerateRequest) -> Refusal | None:
        for one in message.sampling.processors:
            wrong = self._checks.wrong(one.name, one.params)
            if wrong:
                return Refusal(wrong, 400)
        return None

    def enter_row(self, request: Request) -> None:
        self._by_row[request.row] = request.message.sampling.processors

    def prepare(self, batch: Batch, columns: Columns, step: StepInputs) -> None:
        found = batch.sampling_in(self._by_row)
        if found.rows:
            step.blocks_overlap = True
            step.logits += self._calls(found, columns)

    def release(self, request: Request) -> None:
        self._by_row.pop(request.row, None)

    def _calls(self, found: SampledRows, columns: Columns) -> list[ProcessorCall]:
        """The calls: first the first processors of all requests, grouped by name; then the second
        ones, and so on."""
        tokens: list[IntArray] = []
        longest = 0
        for row, length in zip(found.rows, found.lens, strict=True):
            tokens.append(columns.tokens[row, :length].copy())
            longest = max(longest, len(self._by_row[row]))
        calls: list[ProcessorCall] = []
        for number in range(longest):
            by_name: dict[str, _Callers] = {}
            index = found.index.tolist()
            for i, row, before in zip(index, found.rows, tokens, strict=True):
                processors = self._by_row[row]
                if number >= len(processors):
                    continue
                processor = processors[number]
                callers = by_name.setdefault(processor.name, _Callers())
                callers.index.append(i)
                callers.params.append(processor.params)
                callers.tokens.append(before)
                callers.prompt_lens.append(int(columns.prompt_len[row]))
            for name, callers in by_name.items():
                calls.append(callers.call(name))
        return calls


class _Callers:
    """The requests of one step that call the same processor."""

    def __init__(self) -> None:
        self.index: list[int] = []
        self.params: list[Mapping[str, Any]] = []
        self.tokens: list[IntArray] = []
        self.prompt_lens: list[int] = []

    def call(self, name: str) -> ProcessorCall:
        return ProcessorCall(
            name=name,
            index=np.array(self.index, dtype=np.int32),
            params=tuple(self.params),
            tokens=tuple(self.tokens),
            prompt_lens=tuple(self.prompt_lens),
        )

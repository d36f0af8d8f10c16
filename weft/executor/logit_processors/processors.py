"""The logit processors of an engine. Each is called for the rows of its requests, and cannot harm
other rows.

A call that raises is repeated row by row, so that only the requests whose row raises end with an
error. Only rows of requests that name the processor change.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.executor.logit_processors.processor import LogitProcessor, ProcessorRequest
from weft.observe.log import EventLog
from weft.observe.survivable import survived
from weft.plan.logits import ProcessorCall

MAX_MESSAGE_LEN = 300
# Logits per call. The system is slow to allocate memory for a copy of more.
BLOCK_SIZE = 1 << 22

log = EventLog("processors")
T = TypeVar("T")


class Processors:
    def __init__(self, by_name: Mapping[str, LogitProcessor]) -> None:
        self._by_name = dict(by_name)

    @property
    def names(self) -> list[str]:
        return sorted(self._by_name)

    def wrong(self, name: str, params: Mapping[str, Any]) -> str:
        """The reason why a request cannot use this processor with these parameters; "" if it
        can."""
        processor = self._by_name.get(name)
        if processor is None:
            return f"there is no logit processor {name!r}; known are {', '.join(self.names)}"
        try:
            processor.check(params)
        except ValueError as exc:
            return f"logit processor {name!r}: {_short(exc)}"
        except BaseException as exc:
            exc = survived(exc)
            return f"logit processor {name!r} could not check its parameters: {_named(exc)}"
        return ""

    def apply(
        self, logits: Tensor, call: ProcessorCall, *, without: Container[int] = ()
    ) -> dict[int, str]:
        """Change logits [S, V] in place, except for the rows `without`.

        Returns the errors by row. A row with an error is unchanged.
        """
        by_row: dict[int, ProcessorRequest] = {}
        requests = zip(
            call.index.tolist(),
            call.params,
            call.tokens,
            call.prompt_lens,
            strict=True,
        )
        for row, params, tokens, prompt_len in requests:
            if row in without:
                continue
            prompt = tokens[:prompt_len]
            output = tokens[prompt_len:]
            by_row[row] = ProcessorRequest(params, prompt, output)
        vocab_size = logits.shape[1]
        num_rows = max(1, BLOCK_SIZE // vocab_size)
        faults: dict[int, str] = {}
        for block in _batched(by_row.items(), num_rows):
            faults |= self._apply(call.name, logits, dict(block))
        return faults

    def _apply(
        self, name: str, logits: Tensor, by_row: Mapping[int, ProcessorRequest]
    ) -> dict[int, str]:
        rows = torch.tensor(list(by_row), dtype=torch.int64, device=logits.device)
        changed = logits[rows]  # a copy
        try:
            self._by_name[name].apply(changed, list(by_row.values()))
        except BaseException as exc:
            exc = survived(exc)
            if len(by_row) > 1:
                return self._apply_to_each(name, logits, by_row)
            log.seldom("processor_failed", name=name, error=_named(exc))
            return dict.fromkeys(by_row, f"logit processor {name!r} failed: {_named(exc)}")
        usable = _is_usable(changed)
        if bool(usable.all()):
            logits[rows] = changed
            return {}
        logits[rows[usable]] = changed[usable]
        # Only rows that were usable before are errors of the processor.
        spoiled = rows[~usable]
        spoiled = spoiled[_is_usable(logits[spoiled])]
        message = f"logit processor {name!r} has left NaN, an infinite logit, or no token at all"
        log.seldom("processor_failed", name=name, error="no finite logit is left")
        return dict.fromkeys(spoiled.tolist(), message)

    def _apply_to_each(
        self, name: str, logits: Tensor, by_row: Mapping[int, ProcessorRequest]
    ) -> dict[int, str]:
        """Repeat a call that raised, row by row, to find the rows that raise."""
        faults: dict[int, str] = {}
        for row, one in by_row.items():
            faults |= self._apply(name, logits, {row: one})
        return faults


def _batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items in lists of at most `size`."""
    left = iter(items)
    while block := list(islice(left, size)):
        yield block


def _is_usable(logits: Tensor) -> Tensor:
    """Whether a token can be chosen from each row, [P]."""
    max_logits = logits.amax(dim=-1)
    return max_logits.sub(max_logits) == 0


def _named(exc: Exception) -> str:
    return f"{type(exc).__name__}: {_short(exc)}"


def _short(exc: Exception) -> str:
    return str(exc)[:MAX_MESSAGE_LEN]

"""The logit processors of an engine: each called for its rows, and kept from harming others.

A call that raises is repeated row by row, so that only those requests end with an error that make
it raise. No row is changed but those that asked for it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.executor.logit_processors.processor import Asked, LogitProcessor
from weft.observe.log import EventLog
from weft.plan.logits import ProcessorCall

MAX_MESSAGE_LEN = 300
BLOCK_SIZE = (
    1 << 22
)  # logits that are changed in one call: a copy of more is slow to be had from the system

log = EventLog("processors")
T = TypeVar("T")


class Processors:
    def __init__(self, by_name: Mapping[str, LogitProcessor]) -> None:
        self._by_name = dict(by_name)

    @property
    def names(self) -> list[str]:
        return sorted(self._by_name)

    def wrong(self, name: str, params: Mapping[str, Any]) -> str:
        """Why a request cannot have this processor with these parameters; "" if it can."""
        processor = self._by_name.get(name)
        if processor is None:
            return f"there is no logit processor {name!r}; there are {', '.join(self.names)}"
        try:
            processor.check(params)
        except ValueError as exc:
            return f"logit processor {name!r}: {_short(exc)}"
        except Exception as exc:
            return f"logit processor {name!r} could not check its parameters: {_named(exc)}"
        return ""

    def apply(
        self, logits: Tensor, call: ProcessorCall, *, without: Container[int] = ()
    ) -> dict[int, str]:
        """Change logits [S, V] in place, but not in the rows `without`.

        Returns the errors by row; a row with an error is as it was before.
        """
        asked: dict[int, Asked] = {}
        requests = zip(call.index.tolist(), call.params, call.tokens, call.prompt_lens, strict=True)
        for row, params, tokens, prompt_len in requests:
            if row not in without:
                asked[row] = Asked(params, tokens[:prompt_len], tokens[prompt_len:])
        faults: dict[int, str] = {}
        for block in _batched(asked.items(), max(1, BLOCK_SIZE // logits.shape[1])):
            faults |= self._apply(call.name, logits, dict(block))
        return faults

    def _apply(self, name: str, logits: Tensor, asked: Mapping[int, Asked]) -> dict[int, str]:
        rows = torch.tensor(list(asked), dtype=torch.int64, device=logits.device)
        changed = logits[rows]  # a copy
        try:
            self._by_name[name].apply(changed, list(asked.values()))
        except Exception as exc:
            if len(asked) > 1:
                alone = (self._apply(name, logits, {row: one}) for row, one in asked.items())
                return {row: fault for faults in alone for row, fault in faults.items()}
            log.seldom("processor_failed", name=name, error=_named(exc))
            return {row: f"logit processor {name!r} failed: {_named(exc)}" for row in asked}
        usable = _is_usable(changed)
        if bool(usable.all()):
            logits[rows] = changed
            return {}
        logits[rows[usable]] = changed[usable]
        spoiled = rows[~usable]
        spoiled = spoiled[_is_usable(logits[spoiled])]  # others were so before
        message = f"logit processor {name!r} has left NaN, an infinite logit, or no token at all"
        log.seldom("processor_failed", name=name, error="no finite logit is left")
        return dict.fromkeys(spoiled.tolist(), message)


def _batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """So many at a time."""
    left = iter(items)
    while block := list(islice(left, size)):
        yield block


def _is_usable(logits: Tensor) -> Tensor:
    """[P] whether a token can be chosen from each row."""
    max_logits = logits.amax(dim=-1)
    return max_logits.sub(max_logits) == 0


def _named(exc: Exception) -> str:
    return f"{type(exc).__name__}: {_short(exc)}"


def _short(exc: Exception) -> str:
    return str(exc)[:MAX_MESSAGE_LEN]

"""Why prompts of a simulated run were not in the prefix cache: the share of each cause, and what
other settings would have saved.

The causes are those of `weft ctl why`. Each is looked for when its request has ended, so they are
those that the engine itself would have told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.config.numbers import counted
from weft.engine.causes import cause_of
from weft.engine.engine import Engine
from weft.messages.codec import FromEngine, ToEngine
from weft.messages.replies import StepOutput
from weft.sim.run import Clock, Record
from weft.sim.table import table


@dataclass(slots=True)
class CauseSum:
    """All requests of one cause."""

    num_requests: int = 0
    missed_tokens: int = 0
    missed_s: float = 0.0


@dataclass(slots=True)
class CauseSums:
    by_cause: dict[str, CauseSum] = field(default_factory=dict)
    num_prompt_tokens: int = 0  # of the requests that were admitted

    def lines(self) -> str:
        """A table with a row for each cause, the most expensive first."""
        ordered = sorted(self.by_cause.items(), key=_most_missed)
        rows = []
        for cause, one in ordered:
            share = one.missed_tokens / max(self.num_prompt_tokens, 1)
            row = [cause, f"{one.num_requests:,}", f"{one.missed_tokens:,}", f"{share:.1%}"]
            rows.append([*row, f"{one.missed_s:,.1f} s"])
        return table(["cause", "requests", "tokens missed", "of prompts", "of prefills"], rows)


def _most_missed(one: tuple[str, CauseSum]) -> tuple[int, int]:
    return -one[1].missed_tokens, -one[1].num_requests


class ExplainedEngine:
    """An engine whose requests are explained when they have ended."""

    def __init__(self, engine: Engine, clock: Clock, sums: CauseSums) -> None:
        self._engine = engine
        self._sums = sums

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def submit(self, message: ToEngine) -> FromEngine | None:
        return self._engine.submit(message)

    def step(self) -> list[FromEngine]:
        messages = self._engine.step()
        for message in messages:
            if type(message) is StepOutput:
                for finish in message.finished:
                    self._explain(finish.id)
        return messages

    def _explain(self, id: int) -> None:
        scheduler = self._engine.scheduler
        trace = scheduler.history.trace(id)
        if trace is None:
            return
        cause = cause_of(scheduler, trace)
        if cause is None:
            return
        self._sums.num_prompt_tokens += trace.prompt_tokens
        found = self._sums.by_cause.setdefault(cause.cause, CauseSum())
        found.num_requests += 1
        found.missed_tokens += cause.missed_tokens
        found.missed_s += cause.missed_s or 0.0


def savings(names: Sequence[str], records: Sequence[Record]) -> list[str]:
    """What each run after the first computed less, or more, of prompts than the first."""
    computed = [int((record.prompt_len - record.cached_len).sum()) for record in records]
    lines = []
    for name, num in list(zip(names, computed, strict=True))[1:]:
        share = (computed[0] - num) / max(computed[0], 1)
        tokens = counted(abs(computed[0] - num), "token")
        if num <= computed[0]:
            lines.append(f"{name} would have saved {share:.1%} of prefill ({tokens})")
        else:
            lines.append(f"{name} would have computed {-share:.1%} more of prompts ({tokens})")
    return lines

"""The load of an engine: its counters and gauges, sent once a second while it works, and when it
becomes idle."""

from __future__ import annotations

import msgspec

from weft.engine.core import EngineCore
from weft.engine.hooks import Service
from weft.messages.status import Stats
from weft.scheduler.features.grammar import GrammarFeature
from weft.scheduler.features.sessions import Sessions

STATS_INTERVAL_S = 1.0


class LoadReporter(Service):
    """Always attached: the first to see a step begin, the last to see it end."""

    name = "the report of the load"

    def __init__(self, core: EngineCore, sessions: Sessions, grammar: GrammarFeature) -> None:
        self._core = core
        self._sessions = sessions
        self._grammar = grammar
        self._began_s = 0.0  # the present step
        self._had_work = False  # when it began
        self._busy_s = 0.0
        self._reported_s = 0.0  # when the last report was sent

    def before_step(self, now: float) -> None:
        self._began_s = now
        self._had_work = self._core.loop.has_work

    def after_step(self, now: float) -> None:
        if not self._had_work:
            return
        # Also at the end of work, however soon it comes: the last report says that nothing runs.
        self._busy_s += now - self._began_s
        is_due = now - self._reported_s >= STATS_INTERVAL_S
        if is_due or not self._core.loop.has_work:
            self._reported_s = now
            self._core.send(self.stats())

    def stats(self) -> Stats:
        """All counters and gauges as they are now."""
        scheduler = self._core.scheduler
        grammar = self._grammar
        return msgspec.structs.replace(
            scheduler.stats(),
            max_running_requests=scheduler.settings.max_running_requests,
            busy_s=self._busy_s,
            num_sessions=len(self._sessions.by_name),
            num_grammar_queue=len(grammar.queue),
            total_grammars=grammar.num_asked,
            total_grammar_hits=grammar.num_hits,
            total_grammar_refused=grammar.num_refused,
            total_forced_tokens=grammar.num_forced,
        )

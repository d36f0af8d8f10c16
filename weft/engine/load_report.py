"""The load of an engine: its counters and gauges, sent once a second while it works, and when it
becomes idle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from weft.engine.core import EngineCore
from weft.engine.hooks import Service
from weft.messages.status import Stats
from weft.scheduler.features.registry import Features

STATS_INTERVAL_S = 1.0


class KvNumbers(Protocol):
    """What knows of KV outside of the pool."""

    def numbers(self) -> dict[str, int]:
        """By the names that they have in `Stats`."""
        ...


class LoadReporter(Service):
    """Always attached."""

    name = "the report of the load"

    def __init__(self, core: EngineCore, features: Features, stored: Sequence[KvNumbers]) -> None:
        self._core = core
        self._features = features
        self._stored = stored
        self._busy_s = 0.0
        self._reported_s = 0.0  # when the last report was sent

    def after_step(self, now: float) -> None:
        core = self._core
        if not core.had_work:
            return
        self._busy_s += now - core.began_s
        # Also at the end of work, however soon it comes: the last report says that nothing runs.
        is_due = now - self._reported_s >= STATS_INTERVAL_S
        if is_due or not core.loop.has_work:
            self._reported_s = now
            core.load_report = self.stats()

    def stats(self) -> Stats:
        """All counters and gauges as they are now."""
        scheduler = self._core.scheduler
        grammar = self._features.grammar
        adapters = self._features.adapters
        encoded = self._features.media.cache
        pins = self._features.pins
        kv = scheduler.kv
        pinned = 0
        if pins.book.by_name:
            pinned = pins.book.num_pages(kv) * kv.page_size
        stored: dict[str, int] = {}
        for one in self._stored:
            stored.update(one.numbers())
        return msgspec.structs.replace(
            scheduler.stats(),
            max_running_requests=scheduler.settings.max_running_requests,
            busy_s=self._busy_s,
            num_sessions=len(self._features.sessions.by_name),
            num_adapters=len(adapters.loaded),
            adapter_slots=adapters.max_together if adapters.num_adapter_slots else 0,
            adapter_slots_used=len(adapters.num_rows),
            num_grammar_queue=len(grammar.queue),
            total_grammars=grammar.num_asked,
            total_grammar_hits=grammar.num_hits,
            total_grammar_shared=grammar.num_shared,
            total_grammar_refused=grammar.num_refused,
            total_forced_tokens=grammar.num_forced,
            encoder_items=len(encoded.encoded),
            encoder_tokens=encoded.num_tokens,
            encoder_bytes=encoded.num_tokens * encoded.vector_bytes,
            total_encoder_runs=encoded.num_runs,
            total_encoded_tokens=encoded.num_encoded,
            total_encoder_s=encoded.busy_s,
            total_encoder_hits=encoded.num_reused,
            total_encoder_misses=encoded.num_missed,
            num_pins=len(pins.book.by_name),
            pinned_tokens=pinned,
            total_pins_refused=pins.book.num_refused,
            total_pins_given_way=kv.pins.num_given_way,
            **stored,
        )

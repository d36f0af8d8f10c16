"""The line that a server writes about itself while it has work:
how much runs and waits, how fast, how full.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.observe.log import EventLog

INTERVAL_S = 10.0

log = EventLog("status")


class StatusLine:
    """Writes at most one line every `INTERVAL_S`, and none without work."""

    def __init__(self) -> None:
        self._written_at = float("-inf")
        self._before: Mapping[str, float] = {}

    def take(self, numbers: Mapping[str, float], now: float) -> None:
        """`numbers` as the engine has just told them (the fields of `Stats`); `now` in seconds."""
        has_work = numbers["num_running"] or numbers["num_waiting"]
        if has_work and now - self._written_at >= INTERVAL_S:
            self._write(numbers)
            self._written_at = now
            self._before = numbers

    def _write(self, numbers: Mapping[str, float]) -> None:
        grown = {name: value - self._before.get(name, 0) for name, value in numbers.items()}
        busy_s = max(grown["busy_s"], 1e-3)
        log.info(
            "working",
            running=int(numbers["num_running"]),
            waiting=int(numbers["num_waiting"]),
            prompt_tokens_per_s=round(grown["total_prompt_tokens"] / busy_s, 1),
            output_tokens_per_s=round(grown["total_generated_tokens"] / busy_s, 1),
            kv_used=f"{numbers['kv_used'] / max(numbers['kv_tokens'], 1):.1%}",
            cache_hits=f"{grown['total_cached_tokens'] / max(grown['total_prompt_tokens'], 1):.1%}",
            retractions=int(grown["total_retractions"]),
        )

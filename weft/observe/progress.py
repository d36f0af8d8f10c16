"""Progress of a long job: one line on standard error that is rewritten, and nothing if standard
error is not a terminal."""

from __future__ import annotations

import sys
import time

from weft.config.numbers import counted

INTERVAL_S = 0.2


class Progress:
    """Counts requests and tokens. `total` 0: unknown."""

    def __init__(self, total: int = 0, *, shown: bool = True) -> None:
        self._is_shown = shown and sys.stderr.isatty()
        self._total = total
        self._began = time.perf_counter()
        self._written = 0.0
        self.num_requests = 0
        self.num_tokens = 0

    @property
    def text(self) -> str:
        elapsed = max(time.perf_counter() - self._began, 1e-9)
        requests = counted(self.num_requests, "request")
        if self._total:
            requests = f"{self.num_requests:,} of {counted(self._total, 'request')}"
        speed = self.num_tokens / elapsed
        return (
            f"{requests}, {counted(self.num_tokens, 'token')} in {elapsed:.1f} s, "
            f"{speed:,.0f} a second"
        )

    def add(self, num_tokens: int) -> None:
        """Count one more ended request, with its tokens."""
        self.num_requests += 1
        self.num_tokens += num_tokens
        now = time.perf_counter()
        if self._is_shown and now >= self._written + INTERVAL_S:
            self._written = now
            self._write("")

    def close(self) -> None:
        if self._is_shown:
            self._write("\n")

    def _write(self, end: str) -> None:
        sys.stderr.write(f"\r\x1b[2K{self.text}{end}")
        sys.stderr.flush()

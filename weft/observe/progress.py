"""Progress of a long job: one line on standard error that is rewritten, and nothing if standard
error is not a terminal."""

from __future__ import annotations

import sys
import time

from weft.config.numbers import counted

INTERVAL_S = 0.2
WORTH_SAYING_S = 1.0  # a shorter rest is not shown


class Progress:
    """Counts what has ended, and its tokens. `total` 0: unknown. `num_before` of them had ended
    before; `of`: what they are called."""

    def __init__(
        self, total: int = 0, *, num_before: int = 0, of: str = "request", shown: bool = True
    ) -> None:
        self._is_shown = shown and sys.stderr.isatty()
        self._total = total
        self._num_before = num_before
        self._of = of
        self._began = time.perf_counter()
        self._written = 0.0
        self.num_ended = 0
        self.num_failed = 0
        self.num_tokens = 0

    @property
    def text(self) -> str:
        elapsed_s = max(time.perf_counter() - self._began, 1e-9)
        num_there = self._num_before + self.num_ended
        text = counted(num_there, self._of)
        if self._total:
            text = f"{num_there:,} of {counted(self._total, self._of)}"
        if self.num_tokens:
            text += f", {counted(self.num_tokens, 'token')} in {elapsed_s:.1f} s"
            text += f", {self.num_tokens / elapsed_s:,.0f} a second"
        elif self.num_ended:
            text += f", {self.num_ended / elapsed_s:,.1f} a second"
        left_s = (self._total - num_there) * elapsed_s / max(self.num_ended, 1)
        if self.num_ended and left_s > WORTH_SAYING_S:
            text += f", about {left_s:,.0f} s left"
        if self.num_failed:
            text += f", {self.num_failed:,} failed"
        return text

    def add(self, num_tokens: int, *, failed: bool = False) -> None:
        """Count one more that has ended, with its tokens."""
        self.num_ended += 1
        self.num_failed += failed
        self.num_tokens += num_tokens
        now = time.perf_counter()
        if self._is_shown and now >= self._written + INTERVAL_S:
            self._written = now
            self._write("")

    def clear(self) -> None:
        """End a line that was shown."""
        if self._is_shown:
            self._write("\n")

    def close(self, words: str = "") -> None:
        """Write the last line, also where no line was shown, with `words` after it."""
        end = f"; {words}\n" if words else "\n"
        if self._is_shown:
            self._write(end)
        else:
            print(self.text, end=end, file=sys.stderr)

    def _write(self, end: str) -> None:
        sys.stderr.write(f"\r\x1b[2K{self.text}{end}")
        sys.stderr.flush()

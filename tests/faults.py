"""Faults at chosen places: an exception wherever a function of weft is entered or left."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import weft

HOME = str(Path(weft.__file__).parent)


class Injected(RuntimeError):
    """A fault that a test has planted."""


class Places:
    """Counts the functions of weft that are entered (`event` "call") or left ("return") while it
    watches, but for those named in `spared`, and raises `Injected` at number `at`."""

    def __init__(
        self, at: int = -1, event: str = "call", spared: frozenset[str] = frozenset()
    ) -> None:
        self.num = 0
        self.raised_in = ""
        self._at = at
        self._event = event
        self._spared = spared

    @contextmanager
    def watched(self) -> Iterator[Places]:
        before = sys.gettrace()
        # The collector would close generators of the past wherever it happens to run, and those
        # count as functions left.
        gc.disable()
        sys.settrace(self._trace)
        try:
            yield self
        finally:
            sys.settrace(before)
            gc.enable()

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(HOME) or frame.f_code.co_name in self._spared:
            return None
        if event == self._event:
            self.num += 1
            if self.num - 1 == self._at:
                self.raised_in = frame.f_code.co_qualname
                raise Injected(self.raised_in)
        return self._trace

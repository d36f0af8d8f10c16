"""What the bits of a server's K and V depend on, by the names that an error has for it: found out
on a thread, and again after new weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TypeAlias

from weft.observe.log import EventLog

READING = "the weights are still being read"

Facts: TypeAlias = Mapping[str, str]

log = EventLog("handoff")


class KvFacts:
    """`weights` is asked on the engine's thread, once for all weights that there are in turn, and
    returns what finds their facts, on another thread."""

    def __init__(self, weights: Callable[[], Callable[[], Facts]]) -> None:
        self._weights = weights
        self._lock = threading.Lock()
        self._next: Callable[[], Facts] | None = None  # what is to be found out
        self._is_finding = False
        self._now: Facts | str = READING

    @property
    def now(self) -> Facts | str:
        """The facts, or why they are not known."""
        return self._now

    def renew(self) -> None:
        """The weights are others from now on. Returns at once."""
        find = self._weights()
        with self._lock:
            self._now = READING
            self._next = find
            if self._is_finding:
                return
            self._is_finding = True
        threading.Thread(target=self._find, name="weft-handoff-facts", daemon=True).start()

    def _find(self) -> None:
        """Find out what is to be found out, until nothing is. Only the last weights count."""
        while True:
            with self._lock:
                find = self._next
                self._next = None
                if find is None:
                    self._is_finding = False
                    return
            found: Facts | str
            try:
                found = find()
            except Exception as exc:
                log.exception("no_facts", exc)
                found = f"it cannot be told which weights there are ({exc})"
            with self._lock:
                if self._next is None:
                    self._now = found

"""The facts on which a server's K and V depend, by their names in errors. They are computed on a
thread, and again after new weights."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import TypeAlias

from weft.observe.log import EventLog

READING = "the weights are still being read"
# The other side waits for a greeting meanwhile. Weights that take longer are those of large models.
WAIT_S = 3.0

Facts: TypeAlias = Mapping[str, str]

log = EventLog("handoff")


class KvFacts:
    """`weights` is called on the engine's thread, once for each set of weights, and returns a
    function that computes their facts on another thread."""

    def __init__(self, weights: Callable[[], Callable[[], Facts]]) -> None:
        self._weights = weights
        self._lock = threading.Lock()
        self._next: Callable[[], Facts] | None = None  # computes the facts of the latest weights
        self._is_finding = False
        self._now: Facts | str = READING
        self._is_found = threading.Event()

    @property
    def is_known(self) -> bool:
        """Whether `known` need not wait."""
        return self._is_found.is_set()

    async def known(self) -> Facts | str:
        """The facts, or why they are not known. Right after a start, or after new weights, this
        waits for them a little."""
        if not self.is_known:
            await asyncio.to_thread(self._is_found.wait, WAIT_S)
        return self._now

    def renew(self) -> None:
        """The weights have changed. Returns at once."""
        find = self._weights()
        with self._lock:
            self._now = READING
            self._is_found.clear()
            self._next = find
            if self._is_finding:
                return
            self._is_finding = True
        threading.Thread(target=self._find, name="weft-handoff-facts", daemon=True).start()

    def _find(self) -> None:
        """Compute facts until those of the latest weights are known."""
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
                found = f"the weights cannot be identified ({exc})"
            with self._lock:
                if self._next is None:
                    self._now = found
                    self._is_found.set()

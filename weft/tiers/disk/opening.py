"""Whether the stored blocks can be found, and by which keys: those of the weights in use.

engine's thread   renew: the weights have changed ─▶ nothing is found
writing thread    the fingerprint of the new weights ─▶ opened
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from weft.observe.log import EventLog
from weft.tiers.keys import KeyChain

OPENING = "the stored blocks are being listed"

log = EventLog("cache")


class Reopen(NamedTuple):
    """The weights have changed: find the stored blocks of the new weights."""

    number: int  # of the weights
    identify: Callable[[], bytes]


class Opening:
    """`weights` is called on the engine's thread, once for each set of weights, and returns a
    function that computes their fingerprint on another thread."""

    def __init__(
        self,
        weights: Callable[[], Callable[[], bytes]],
        block_len: int,
        notify: Callable[[], None],
    ) -> None:
        self._weights = weights
        self._block_len = block_len
        self._notify = notify
        self._lock = threading.Lock()
        self._num_renewed = 0
        self.chain: KeyChain | None = None  # None: no block is found
        self.state = OPENING
        self.is_stopped = False
        self.has_opened = False  # since the engine asked last

    # Called by the engine

    def first(self) -> Reopen:
        return Reopen(0, self._weights())

    def renew(self, why: str) -> Reopen:
        """Find nothing until the stored blocks of the new weights are known."""
        with self._lock:
            self.chain = None
            self.has_opened = False
            self._num_renewed += 1
            if not self.is_stopped:
                self.state = OPENING
        log.info("renewed", reason=why)
        return Reopen(self._num_renewed, self._weights())

    def stop(self, why: str) -> None:
        with self._lock:
            self.is_stopped = True
            self.chain = None
            self.state = why
        log.warning("stopped", reason=why)

    def take(self) -> bool:
        """Whether the store has opened since the last call."""
        with self._lock:
            has_opened = self.has_opened
            self.has_opened = False
        return has_opened

    def tell_again(self) -> None:
        """A new engine has not been told that the store is open."""
        with self._lock:
            self.has_opened = self.chain is not None

    # Called by the writing thread

    def chain_of(self, asked: Reopen) -> KeyChain | None:
        """Compute the fingerprint of weights. None if it cannot be computed."""
        try:
            return KeyChain(asked.identify(), self._block_len)
        except Exception as exc:
            log.exception("not_opened", exc)
            with self._lock:
                if self._is_wanted(asked):
                    self.state = f"the weights could not be read: {exc}"
            return None

    def opened(self, asked: Reopen, chain: KeyChain) -> bool:
        """The folder has been scanned: from now on, blocks of these weights are found. Returns
        whether this is still wanted."""
        with self._lock:
            if not self._is_wanted(asked):
                return False
            self.state = "open"
            self.chain = chain
            self.has_opened = True
        self._notify()
        return True

    def _is_wanted(self, asked: Reopen) -> bool:
        """Whether the weights have not changed again, and the store is in use."""
        return asked.number == self._num_renewed and not self.is_stopped

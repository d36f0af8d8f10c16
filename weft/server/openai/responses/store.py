"""Responses that can be asked for again: a bounded store in memory, oldest out first. Nothing survives the server.

Whoever may use the API and knows a response's id, which nobody can guess, may read and delete it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

MAX_STORED = 1_000
MAX_STORED_BYTES = 64_000_000
STORED_S = 3_600.0  # then a response is forgotten


class Stored(NamedTuple):
    """`history`: the messages of the conversation up to and with this response, without its instructions."""

    response: dict[str, Any]
    history: list[Any]
    size: int  # bytes, as JSON
    at_s: float


class ResponseStore:
    """The responses of one server. `running` are those that generate without a client that waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.running: dict[str, asyncio.Task[None]] = {}
        self._clock = clock
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._size = 0

    def put(self, response: dict[str, Any], history: list[Any]) -> None:
        """Keep a response, in the place of an older state of it. One that is larger than the store is not kept."""
        self.drop(response["id"])
        size = len(msgspec.json.encode(response)) + len(msgspec.json.encode(history))
        if size > MAX_STORED_BYTES:
            return
        self._stored[response["id"]] = Stored(response, history, size, self._clock())
        self._size += size
        while self._size > MAX_STORED_BYTES or len(self._stored) > MAX_STORED:
            self.drop(next(iter(self._stored)))

    def get(self, id: str) -> Stored | None:
        oldest_s = self._clock() - STORED_S
        while self._stored and next(iter(self._stored.values())).at_s < oldest_s:
            self.drop(next(iter(self._stored)))
        return self._stored.get(id)

    def drop(self, id: str) -> bool:
        """Whether it was there."""
        stored = self._stored.pop(id, None)
        if stored is not None:
            self._size -= stored.size
        return stored is not None

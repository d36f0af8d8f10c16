"""Stored responses: a bounded store in memory. Nothing survives a restart of the server.

A response belongs to the key that created it: to any other key its id is unknown. When the store is
full, the key with the most data loses its oldest response.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from weft.json_types import JsonObject

MAX_STORED = 1_000
MAX_STORED_BYTES = 64_000_000
STORED_S = 3_600.0  # seconds until a response is forgotten


class Stored(NamedTuple):
    """`history`: the messages of the conversation up to and including this response, without its
    instructions. `items`: the input of this response's request only."""

    response: JsonObject
    history: list[Any]
    items: list[JsonObject]
    size: int  # bytes, as JSON
    at_s: float
    owner: str


class ResponseStore:
    """The responses of one server.

    `running`: the tasks of responses that generate without a waiting client, by id.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.running: dict[str, asyncio.Task[None]] = {}
        self._clock = clock
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._size = 0
        self._sizes = Counter[str]()  # by owner
        self._counts = Counter[str]()  # by owner

    def put(
        self,
        response: JsonObject,
        history: list[Any],
        owner: str = "",
        items: Sequence[JsonObject] = (),
    ) -> None:
        """Store a response, in place of an older state of it.

        A response that is larger than the store is not kept.
        """
        self.drop(response["id"])
        size = 0
        for part in (response, history, items):
            size += len(msgspec.json.encode(part))
        if size > MAX_STORED_BYTES:
            return
        self._stored[response["id"]] = Stored(
            response, history, list(items), size, self._clock(), owner
        )
        self._size += size
        self._sizes[owner] += size
        self._counts[owner] += 1
        while self._size > MAX_STORED_BYTES:
            self._drop_oldest_of(max(self._sizes, key=self._sizes.__getitem__))
        while len(self._stored) > MAX_STORED:
            self._drop_oldest_of(max(self._counts, key=self._counts.__getitem__))

    def get(self, id: str, owner: str = "") -> Stored | None:
        """The response of that id, if it belongs to `owner`."""
        oldest_s = self._clock() - STORED_S
        while self._stored and next(iter(self._stored.values())).at_s < oldest_s:
            self.drop(next(iter(self._stored)))
        stored = self._stored.get(id)
        if stored is None or stored.owner != owner:
            return None
        return stored

    def drop(self, id: str) -> bool:
        """Remove a response. Returns whether it was stored."""
        stored = self._stored.pop(id, None)
        if stored is None:
            return False
        self._size -= stored.size
        self._sizes[stored.owner] -= stored.size
        self._counts[stored.owner] -= 1
        if not self._counts[stored.owner]:
            del self._sizes[stored.owner], self._counts[stored.owner]
        return True

    def _drop_oldest_of(self, owner: str) -> None:
        for id, stored in self._stored.items():
            if stored.owner == owner:
                self.drop(id)
                return

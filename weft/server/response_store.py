"""Stored responses: a bounded store in memory, with a copy on disk if a folder is given for it.

A response belongs to the key that created it: to any other key its id is unknown. When the store is
full, the key with the most data loses its oldest response.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from weft.json_types import JsonObject
from weft.state.store import RecordPart, StateStore

MAX_STORED = 1_000
MAX_STORED_BYTES = 64_000_000
STORED_S = 3_600.0  # seconds until a response is forgotten
KIND = "response"
RESPONSE = ""  # the parts of its record
HISTORY = "history"
ITEMS = "items"
RESTARTED = "the server was started again while this response was generated"


class Stored(NamedTuple):
    """`history`: the messages of the conversation up to and including this response, without its
    instructions. `items`: the input of this response's request only."""

    response: JsonObject
    history: list[Any]  # as JSON has them
    items: list[JsonObject]


class _Kept(NamedTuple):
    """A stored response as JSON: most are never asked for again."""

    response: bytes
    history: bytes
    items: bytes
    at_s: float  # Unix time
    owner: str

    @property
    def size(self) -> int:
        return len(self.response) + len(self.history) + len(self.items)


class _Status(msgspec.Struct):
    status: str = ""


_status = msgspec.json.Decoder(_Status)


class ResponseStore:
    """The responses of one server.

    `running`: the tasks of responses that generate without a waiting client, by id.
    """

    def __init__(
        self, clock: Callable[[], float] = time.time, state: StateStore | None = None
    ) -> None:
        """With a `state`, the store begins with what it has from earlier servers."""
        self.running: dict[str, asyncio.Task[None]] = {}
        self._clock = clock
        self._state = state
        self._stored: OrderedDict[str, _Kept] = OrderedDict()  # oldest first
        self._size = 0
        self._sizes = Counter[str]()  # by owner
        self._counts = Counter[str]()  # by owner
        if state is not None:
            self._restore(state.read(KIND))

    @property
    def settled(self) -> Callable[[], Any] | None:
        """Waits until all that was put and dropped is on disk; None if nothing has to be."""
        return None if self._state is None else self._state.settled

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
        encode = msgspec.json.encode
        kept = _Kept(encode(response), encode(history), encode(items), self._clock(), owner)
        if kept.size > MAX_STORED_BYTES:
            self.drop(response["id"])
            return
        if self._state is not None:
            parts = {RESPONSE: kept.response, HISTORY: kept.history, ITEMS: kept.items}
            self._state.put(KIND, owner, response["id"], parts)
        self._enter(response["id"], kept)

    def get(
        self,
        id: str,
        owner: str = "",
    ) -> Stored | None:
        """The response of that id, if it belongs to `owner`."""
        self._drop_expired()
        kept = self._stored.get(id)
        if kept is None or kept.owner != owner:
            return None
        decode = msgspec.json.decode
        return Stored(decode(kept.response), decode(kept.history), decode(kept.items))

    def drop(
        self,
        id: str,
    ) -> bool:
        """Remove a response. Returns whether it was stored."""
        kept = self._leave(id)
        if kept is None:
            return False
        if self._state is not None:
            self._state.delete(KIND, kept.owner, id)
        return True

    def prune(
        self,
        older_than_s: float,
    ) -> int:
        """Remove the responses that were stored so long ago. Returns their number."""
        limit_s = self._clock() - older_than_s
        old = [
            id
            for id, kept in self._stored.items()
            if kept.at_s <= limit_s and id not in self.running
        ]
        for id in old:
            self.drop(id)
        return len(old)

    def _enter(
        self,
        id: str,
        kept: _Kept,
    ) -> None:
        self._leave(id)
        self._drop_expired()
        self._stored[id] = kept
        self._size += kept.size
        self._sizes[kept.owner] += kept.size
        self._counts[kept.owner] += 1
        while self._size > MAX_STORED_BYTES:
            self._drop_oldest_of(max(self._sizes, key=self._sizes.__getitem__))
        while len(self._stored) > MAX_STORED:
            self._drop_oldest_of(max(self._counts, key=self._counts.__getitem__))

    def _leave(
        self,
        id: str,
    ) -> _Kept | None:
        kept = self._stored.pop(id, None)
        if kept is not None:
            self._size -= kept.size
            self._sizes[kept.owner] -= kept.size
            self._counts[kept.owner] -= 1
            if not self._counts[kept.owner]:
                del self._sizes[kept.owner], self._counts[kept.owner]
        return kept

    def _drop_expired(self) -> None:
        oldest_s = self._clock() - STORED_S
        while self._stored and next(iter(self._stored.values())).at_s < oldest_s:
            self.drop(next(iter(self._stored)))

    def _drop_oldest_of(
        self,
        owner: str,
    ) -> None:
        for id, kept in self._stored.items():
            if kept.owner == owner:
                self.drop(id)
                return

    # ---- from an earlier server

    def _restore(
        self,
        parts: Iterable[RecordPart],
    ) -> None:
        """Enter what is on disk. A response that was still generated has failed."""
        found: dict[str, dict[str, RecordPart]] = {}
        for part in parts:
            found.setdefault(part.name, {})[part.part] = part
        in_order = sorted(found.items(), key=lambda item: item[1][RESPONSE].used_s)
        for id, of_id in in_order:
            head = of_id[RESPONSE]
            kept = _Kept(head.body, of_id[HISTORY].body, of_id[ITEMS].body, head.used_s, head.owner)
            self._enter(id, kept)
            if _status.decode(kept.response).status in ("queued", "in_progress"):
                self._fail(id, head.owner)

    def _fail(
        self,
        id: str,
        owner: str,
    ) -> None:
        stored = self.get(id, owner)
        if stored is not None:
            error = {"code": "server_error", "message": RESTARTED}
            response = {**stored.response, "status": "failed", "error": error}
            self.put(response, stored.history, owner, stored.items)

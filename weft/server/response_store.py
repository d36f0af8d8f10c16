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
EXPIRY_SLACK_S = 1.0  # one timer drops all that expire within it
KIND = "response"
RESPONSE = ""  # the parts of its record
HISTORY = "history"
ITEMS = "items"
RESTARTED = "the server was started again while this response was generated"


class Stored(NamedTuple):
    """A stored response as JSON, of which a part is decoded when it is asked for: most never are.

    `history`: the messages of the conversation up to and including this response, without its
    instructions. `items`: the input of this response's request only.
    """

    response_json: bytes
    history_json: bytes
    items_json: bytes
    at_s: float  # Unix time
    owner: str

    @property
    def size(self) -> int:
        return len(self.response_json) + len(self.history_json) + len(self.items_json)

    @property
    def response(self) -> JsonObject:
        decoded: JsonObject = msgspec.json.decode(self.response_json)
        return decoded

    @property
    def history(self) -> list[Any]:  # as JSON has them
        decoded: list[Any] = msgspec.json.decode(self.history_json)
        return decoded

    @property
    def items(self) -> list[JsonObject]:
        decoded: list[JsonObject] = msgspec.json.decode(self.items_json)
        return decoded

    @property
    def is_background(self) -> bool:
        return _head.decode(self.response_json).background

    @property
    def status(self) -> str:
        return _head.decode(self.response_json).status


class _Head(msgspec.Struct):
    status: str = ""
    background: bool = False


_head = msgspec.json.Decoder(_Head)


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
        self._timer: asyncio.TimerHandle | None = None  # for the oldest, in a running loop
        self._state = state
        self._stored: OrderedDict[str, Stored] = OrderedDict()  # oldest first
        self._size = 0
        self._sizes = Counter[str]()  # by owner
        self._counts = Counter[str]()  # by owner
        if state is not None:
            self._restore(state.read(KIND))

    @property
    def settled(self) -> Callable[[], Any] | None:
        """Waits until all that was put and dropped is on disk; None if nothing has to be."""
        return None if self._state is None else self._state.settled

    def require_room(self) -> None:
        """Before a response that is to be stored is generated. Raises StateError."""
        if self._state is not None:
            self._state.require_room()

    def close(self) -> None:
        """Nothing is dropped any more."""
        if self._timer is not None:
            self._timer.cancel()

    def put(
        self,
        response: JsonObject,
        history: list[Any],
        owner: str = "",
        items: Sequence[JsonObject] = (),
    ) -> None:
        """Store a response, instead of an older state of it.

        A response that is larger than the store is not kept.
        """
        encode = msgspec.json.encode
        kept = Stored(encode(response), encode(history), encode(items), self._clock(), owner)
        if kept.size > MAX_STORED_BYTES:
            self.drop(response["id"])
            return
        self._write(response["id"], kept)
        self._enter(response["id"], kept)

    def put_again(self) -> None:
        """Write all that is stored once more, because the disk has lost it."""
        for id, kept in self._stored.items():
            self._write(id, kept)

    def _write(self, id: str, kept: Stored) -> None:
        if self._state is None:
            return
        parts = {
            RESPONSE: kept.response_json,
            HISTORY: kept.history_json,
            ITEMS: kept.items_json,
        }
        self._state.put(KIND, kept.owner, id, parts)

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
        return kept

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
        kept: Stored,
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
        self._wait_for_oldest()

    def _leave(
        self,
        id: str,
    ) -> Stored | None:
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

    def _wait_for_oldest(self) -> None:
        """Drop what expires also while nobody asks: one timer waits while anything is stored."""
        if self._timer is not None or not self._stored:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a store without a server
            return
        left_s = next(iter(self._stored.values())).at_s + STORED_S - self._clock()
        self._timer = loop.call_later(max(left_s, 0.0) + EXPIRY_SLACK_S, self._at_time)

    def _at_time(self) -> None:
        self._timer = None
        self._drop_expired()
        self._wait_for_oldest()

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
            kept = Stored(
                head.body, of_id[HISTORY].body, of_id[ITEMS].body, head.used_s, head.owner
            )
            self._enter(id, kept)
            if kept.status in ("queued", "in_progress"):
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

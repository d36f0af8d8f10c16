"""Requests whose prompt one server computes and another one continues.

Where prompts are computed, the KV of a request that has ended is lent under the name of its room
(`LendFeature`). Where they are continued, a request waits until its KV has come from the other
server (`PullFeature`), and is then an ordinary one with a long cached prefix. When and how long is
decided in `engine/handoff/`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.memory.handoff.leases import Lease
from weft.memory.handoff.protocol import Handoff, MeetingPlace
from weft.memory.prefix_cache import CacheKey
from weft.messages.replies import FinishReason
from weft.messages.requests import GenerateRequest
from weft.scheduler.feature import Admission, Feature, Note
from weft.scheduler.kv import KvMemory
from weft.scheduler.request import Request
from weft.scheduler.settings import HandoffSettings

UNWANTED = "the other server does not need it"


class LendFeature(Feature):
    """`handoff` is the engine's, which sets it."""

    request_fields = ("handoff",)

    def __init__(self, settings: HandoffSettings, handoff: Handoff) -> None:
        self._settings = settings
        self._handoff = handoff
        self.rooms: dict[int, str] = {}  # of open requests
        self.unwanted: set[str] = set()  # those of them that nobody needs any more
        self.num_lent = 0  # tokens
        self.lent: dict[str, int] = {}  # the request of each room that has a lease
        self.begun: list[Lease] = []  # that nobody may read yet: launched steps may write there
        self.notes: list[Note] = []  # for the histories of requests that may have ended

    def arrive(self, message: GenerateRequest) -> None:
        assert message.handoff is not None
        room = message.handoff.room
        self.rooms[message.id] = room
        self.unwanted.discard(room)
        self._handoff.expect(room)
        self.notes.append(Note(message.id, f"its KV is going to be lent in the room {room}"))

    def end(self, request: Request, reason: FinishReason, now: float, kv: KvMemory) -> None:
        self.rooms.pop(request.id, None)  # it has not arrived if the queue was too long
        assert request.message.handoff is not None
        room = request.message.handoff.room
        key = request.cache_key(request.packed)
        why = self._why_not(room, reason)
        lease: Lease | None = None
        if not why:
            replaced = self.lent.pop(room, None)
            if replaced is not None:
                told = "its KV is not lent any more: another request has its room"
                self.notes.append(Note(replaced, told))
            lease = kv.leases.begin(room, key, now + self._settings.lease_s)
            why = "nothing of it is cached"
        if lease is None:
            self._handoff.refuse(room, why)
            self.notes.append(Note(request.id, f"its KV is not lent: {why}"))
            return
        self.num_lent += lease.num_tokens
        self.begun.append(lease)
        self.lent[room] = request.id
        detail = f"{lease.num_tokens:,} tokens of its KV are lent in the room {room}"
        self.notes.append(Note(request.id, detail))
        kv.leases.shrink_to(int(kv.allocator.num_pages * self._settings.largest_share))

    def _why_not(self, room: str, reason: FinishReason) -> str:
        """Why the KV of a request that has ended is not lent; nothing if it is."""
        if room in self.unwanted:
            self.unwanted.discard(room)
            return UNWANTED
        if reason not in ("stop", "length"):
            return f"its request ended with {reason}"
        return ""


@dataclass(slots=True)
class Pull:
    """What is wanted of a room of another server, by one request or several with one prompt."""

    place: MeetingPlace
    key: CacheKey  # as far as it may be reused, whole pages
    since_s: float
    until_s: float
    ids: list[int] = field(default_factory=list)  # of the requests that wait for it
    num_found: int = 0  # tokens that are ready there; 0: they are not yet
    needed: int = 0  # tokens of memory that are waited for; 0: none
    ticket: int | None = None  # of what is on its way
    num_landed: int = 0  # tokens that have come


class PullFeature(Feature):
    request_fields = ("handoff",)

    def __init__(self) -> None:
        self.pulls: dict[int, Pull] = {}  # by their numbers, the oldest first
        self.waiting: dict[int, int] = {}  # the pull of each request that waits
        self.left: list[int] = []  # requests that have ended while they waited

    def admit(self, request: Request) -> Admission:
        return Admission.WAIT if request.id in self.waiting else Admission.READY

    def why_waits(self, request: Request) -> str:
        pull = self.pulls[self.waiting[request.id]]
        if not pull.num_found:
            return f"its prompt is being computed by {pull.place}"
        if pull.needed:
            return f"room for {pull.needed:,} tokens of KV that are ready on {pull.place}"
        return f"{pull.num_found:,} tokens of KV are on their way from {pull.place}"

    def end(self, request: Request, reason: FinishReason, now: float, kv: KvMemory) -> None:
        if request.id in self.waiting:
            self.left.append(request.id)

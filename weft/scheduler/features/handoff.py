"""Requests whose prompt one server computes and another one continues.

On the server that computes prompts, the KV of an ended request is lent under the name of its room
(`LendFeature`). On the server that continues, a request waits until its KV has come from the other
server (`PullFeature`), and is then an ordinary request with a long cached prefix. `engine/handoff/`
decides on times and durations.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.memory.handoff.leases import Lease
from weft.memory.handoff.protocol import Handoff, RoomAddress
from weft.memory.prefix_cache import TOKEN_BYTES, CacheKey
from weft.messages.replies import FinishReason
from weft.messages.requests import GenerateRequest
from weft.scheduler.feature import Admission, Feature, Note
from weft.scheduler.kv import KvMemory
from weft.scheduler.request import Request
from weft.scheduler.settings import HandoffSettings

UNWANTED = "the other server does not need it"


class LendFeature(Feature):
    """The engine sets `handoff`."""

    request_fields = ("handoff",)

    def __init__(self, settings: HandoffSettings, handoff: Handoff) -> None:
        self._settings = settings
        self._handoff = handoff
        self.rooms: dict[int, str] = {}  # of open requests
        self.unwanted: set[str] = set()  # rooms that the other server no longer needs
        self.num_lent = 0  # tokens
        self.lent: dict[str, int] = {}  # id of the request of each room that has a lease
        # leases that may not be read yet, because launched steps may write there
        self.begun: list[Lease] = []
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
        tokens = request.packed
        if kv.leases.resume_state_capacity:
            # The other server computes at least the last token, so it resumes before that one.
            tokens = tokens[: request.reusable_len * TOKEN_BYTES]
        key = request.cache_key(tokens)
        why = self._why_not(room, reason)
        lease: Lease | None = None
        if not why:
            replaced = self.lent.pop(room, None)
            if replaced is not None:
                message = "its KV is not lent any more: another request has its room"
                self.notes.append(Note(replaced, message))
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
        share = self._settings.largest_share
        num_resume_slots = int(kv.leases.resume_state_capacity * share)
        kv.leases.shrink_to(int(kv.allocator.num_pages * share), num_resume_slots)

    def _why_not(self, room: str, reason: FinishReason) -> str:
        """Why the KV of an ended request is not lent; empty if it is lent."""
        if room in self.unwanted:
            self.unwanted.discard(room)
            return UNWANTED
        if reason not in ("stop", "length"):
            return f"its request ended with {reason}"
        return ""


@dataclass(slots=True)
class Pull:
    """The KV that one request, or several with one prompt, want from a room of another server."""

    address: RoomAddress
    key: CacheKey  # the tokens that may be reused, whole pages
    since_s: float
    until_s: float
    ids: list[int] = field(default_factory=list)  # requests that wait for it
    num_found: int = 0  # tokens that are ready on the other server; 0: not ready yet
    lacks: str = ""  # the memory for which the next transfer waits; empty: it does not wait
    ticket: int | None = None  # of the transfer in progress
    num_landed: int = 0  # tokens that have been received

    @property
    def shortage(self) -> str:
        """Why KV that is ready on the other server is not being transferred."""
        if self.lacks:
            return self.lacks
        return (
            f"no KV memory for {self.num_found:,} tokens that are ready on {self.address}: prompts "
            "that were asked for before it get memory first"
        )


class PullFeature(Feature):
    request_fields = ("handoff",)

    def __init__(self) -> None:
        self.pulls: dict[int, Pull] = {}  # by number, oldest first
        self.waiting: dict[int, int] = {}  # number of the pull, by id of the waiting request
        self.left: list[int] = []  # ids of requests that ended while they waited

    def admit(self, request: Request) -> Admission:
        return Admission.WAIT if request.id in self.waiting else Admission.READY

    def why_waits(self, request: Request) -> str:
        pull = self.pulls[self.waiting[request.id]]
        if not pull.num_found:
            return f"its prompt is being computed by {pull.address}"
        if pull.ticket is None:
            return pull.shortage
        return f"{pull.num_found:,} tokens of KV are on their way from {pull.address}"

    def end(self, request: Request, reason: FinishReason, now: float, kv: KvMemory) -> None:
        if request.id in self.waiting:
            self.left.append(request.id)

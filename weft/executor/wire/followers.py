"""The other ranks as the one that decides sees them: what it tells them, and what they answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from weft.executor.wire.pack import unpack
from weft.executor.wire.shared_pool import SharedPool
from weft.ops.sharding import Collective, RankLost, RankPlace
from weft.ops.stages import Pipe, StagePlace
from weft.parallel.links import Link, Loss
from weft.parallel.shared_memory import SharedSegment
from weft.plan.device import DeviceReply

PLAN, REQUEST, READ, REPLY, FAILED, READY = b"P", b"Q", b"A", b"R", b"F", b"Y"
LAST_WORDS_S = 0.5  # for what a rank that has ended said last


class Followers:
    """All other ranks, from rank 1 on."""

    def __init__(self, links: Sequence[Link], loss: Loss | None = None) -> None:
        """`loss`: what those who watch the ranks know of their ends."""
        self._links = links
        self._loss = loss or Loss()
        self._lost: RankLost | None = None
        self._notes: deque[tuple[bytes, bytes]] = deque()  # that go before the next message

    def note(self, kind: bytes, data: bytes) -> None:
        """Tell this before what is told next. On any thread: links are for one alone."""
        self._notes.append((kind, data))

    def tell(self, kind: bytes, data: bytes) -> None:
        """Raises RankLost, now and ever after a rank was lost."""
        if self._lost is not None:
            raise self._lost
        while self._notes:
            self._send(*self._notes.popleft())
        self._send(kind, data)

    def _send(self, kind: bytes, data: bytes) -> None:
        for rank, link in enumerate(self._links, start=1):
            try:
                link.send(kind, data)
            except RankLost:
                self.lose(self._why(rank, link))

    def replies(self) -> list[DeviceReply]:
        """One of each rank. Raises RankLost."""
        found = []
        for rank, link in enumerate(self._links, start=1):
            try:
                kind, data = link.recv()
            except RankLost:
                self.lose(self._why(rank, link))
            if kind != REPLY:
                self.lose(f"rank {rank} failed: {data.decode(errors='replace')}")
            found.append(unpack(data, DeviceReply))
        return found

    def lose(self, why: str) -> None:
        """Raises RankLost."""
        self._lost = RankLost(why)
        raise self._lost

    def explain(self, exc: RankLost) -> RankLost:
        """Which rank is to blame for a step that broke off, if one has said so."""
        for rank, link in enumerate(self._links, start=1):
            try:
                kind, data = link.recv(LAST_WORDS_S)
            except (RankLost, TimeoutError):
                continue
            if kind == FAILED:
                self._lost = RankLost(f"rank {rank} failed: {data.decode(errors='replace')}")
                return self._lost
        self._lost = RankLost(self._loss.wait(LAST_WORDS_S) or str(exc))
        return self._lost

    def _why(self, rank: int, link: Link) -> str:
        """What a rank that takes nothing any more has said last."""
        try:
            _, data = link.recv(LAST_WORDS_S)
        except (RankLost, TimeoutError):
            return self._loss.wait(LAST_WORDS_S) or f"rank {rank} has ended"
        return f"rank {rank} failed: {data.decode(errors='replace')}"


@dataclass(frozen=True)
class Ranks:
    """The processes that hold a model together, as one of them sees them."""

    place: RankPlace  # among those that have parts of the same layers
    followers: Followers | None  # None: this is one
    timeout_s: float  # for which they wait for each other
    collective: Collective | None = None  # by a library of torch; None: they share memory
    memory: SharedSegment | None = None
    pool: SharedPool | None = None  # for K and V, where rank 0 is to have them, too
    # Where each has some of the layers: which this one has, and its way to its neighbours.
    stage: StagePlace | None = None
    pipe: Pipe | None = None

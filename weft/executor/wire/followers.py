"""The other ranks as rank 0 sees them: messages to them, and their replies."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from weft.executor.wire.pack import unpack
from weft.executor.wire.shared_pool import SharedPool
from weft.ops.sharding import Collective, GroupRank, RankLost
from weft.ops.stages import Pipe, PpStage
from weft.parallel.links import Link, Loss
from weft.parallel.shared_memory import SharedSegment
from weft.plan.device import DeviceReply

PLAN, REQUEST, READ, REPLY, FAILED, READY = b"P", b"Q", b"A", b"R", b"F", b"Y"
LAST_WORDS_S = 0.5  # wait for the last message of a rank that has ended


class Followers:
    """All other ranks, from rank 1 on."""

    def __init__(self, links: Sequence[Link], loss: Loss | None = None) -> None:
        """`loss`: knows how ranks ended, from the processes that watch them."""
        self._links = links
        self._loss = loss or Loss()
        self._lost: RankLost | None = None
        self._notes: deque[tuple[bytes, bytes]] = deque()  # sent before the next message

    def note(self, kind: bytes, data: bytes) -> None:
        """Send this before the next message. Called on any thread; links are used by one thread
        only."""
        self._notes.append((kind, data))

    def tell(self, kind: bytes, data: bytes) -> None:
        """Send a message to all. Raises RankLost, also in every call after a rank was lost."""
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
        """One reply of each rank. Raises RankLost."""
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
        """Remember the loss. Raises RankLost."""
        self._lost = RankLost(why)
        raise self._lost

    def explain(self, exc: RankLost) -> RankLost:
        """The rank that caused a step to break off, if one has reported it."""
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
        """The last message of a rank that accepts no more."""
        try:
            _, data = link.recv(LAST_WORDS_S)
        except (RankLost, TimeoutError):
            return self._loss.wait(LAST_WORDS_S) or f"rank {rank} has ended"
        return f"rank {rank} failed: {data.decode(errors='replace')}"


@dataclass(frozen=True)
class Ranks:
    """The processes that share a model, as one of them sees them."""

    group_rank: GroupRank  # among the ranks that share the same layers
    followers: Followers | None  # None: this rank is a follower
    timeout_s: float  # for which ranks wait for each other
    collective: Collective | None = None  # through torch; None: they share memory
    memory: SharedSegment | None = None
    pool: SharedPool | None = None  # for K and V that rank 0 must access, too
    # If each rank has some of the layers: the layers of this rank, and its links to neighbours.
    pp_stage: PpStage | None = None
    pipe: Pipe | None = None

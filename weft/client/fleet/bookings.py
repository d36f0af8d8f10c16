"""Which engine of a fleet has each open request, and which has each session.

The router (`weft/route`) chooses among engines; here stands what binds a request to one of them:
completions of one prompt stay together, and a request of a session goes where the session is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from weft.messages.handoff import HandoffParams
from weft.messages.media import with_digests
from weft.messages.replies import StepOutput
from weft.messages.requests import GenerateRequest
from weft.route.policy import EngineRouter, RoutedRequest

MAX_SESSIONS = 65_536  # whose engine is remembered; the least recently used are forgotten


class OpenBookings:
    """The open requests of a fleet, and the engine of each."""

    def __init__(self, router: EngineRouter) -> None:
        self.router = router
        self._unbegun: set[int] = set()  # open requests without a first token
        self._siblings: dict[tuple[str, int], set[int]] = {}  # open requests of one prompt
        self._sibling_key: dict[int, tuple[str, int]] = {}

    @property
    def is_empty(self) -> bool:
        return not (self._unbegun or self._siblings or self._sibling_key)

    def rank_of_siblings(self, request: GenerateRequest) -> int | None:
        """The engine that has another completion of the same prompt, if one is open."""
        siblings = self._siblings.get(_prompt_of(request))
        if not siblings:
            return None
        # The requests of an engine that takes none have ended.
        rank = self.router.rank_of(next(iter(siblings)))
        assert rank is not None
        return rank

    def book(self, request: GenerateRequest, ranks: Sequence[int]) -> int:
        """Choose one of `ranks` for a request, and record it."""
        routed = RoutedRequest(
            tokens=with_digests(request.input_ids, request.media),
            namespace=f"{request.adapter}\x1f{request.cache_salt}",
            shares_kv=request.shares_kv,
            room=_room_number(request.handoff),
        )
        rank = self.router.open(request.id, routed, ranks)
        key = _prompt_of(request)
        self._unbegun.add(request.id)
        self._siblings.setdefault(key, set()).add(request.id)
        self._sibling_key[request.id] = key
        return rank

    def by_rank(self, ids: Iterable[int]) -> dict[int, list[int]]:
        """Those of `ids` that are open, by their engine."""
        found: dict[int, list[int]] = {}
        for id in ids:
            rank = self.router.rank_of(id)
            if rank is not None:
                found.setdefault(rank, []).append(id)
        return found

    def note(self, step: StepOutput) -> None:
        """Requests have got tokens, or have ended."""
        if self._unbegun:
            for id in self._unbegun.intersection(np.frombuffer(step.ids, np.int64).tolist()):
                self._unbegun.discard(id)
                self.router.began(id)
        for finish in step.finished:
            self.forget(finish.id)

    def forget(self, id: int) -> None:
        """A request has ended."""
        self.router.ended(id)
        self._unbegun.discard(id)
        key = self._sibling_key.pop(id, None)
        if key is not None:
            siblings = self._siblings[key]
            siblings.discard(id)
            if not siblings:
                del self._siblings[key]

    def forget_all_of(self, rank: int) -> list[int]:
        """The requests of an engine end. Returns their ids."""
        ids = self.router.open_on(rank)
        for id in ids:
            self.forget(id)
        return ids


class SessionRanks:
    """The engine of each session."""

    def __init__(self) -> None:
        self.rank: dict[tuple[str, str], int] = {}  # by id and owner

    def bind(self, id: str, owner: str, rank: int) -> None:
        self.rank.pop((id, owner), None)
        self.rank[id, owner] = rank
        while len(self.rank) > MAX_SESSIONS:
            del self.rank[next(iter(self.rank))]

    def of(self, id: str, owner: str) -> int | None:
        """The engine of a session, which is used now; None if no engine is known to have it."""
        rank = self.rank.get((id, owner))
        if rank is not None:
            self.bind(id, owner, rank)
        return rank

    def forget(self, id: str, owner: str) -> None:
        self.rank.pop((id, owner), None)

    def forget_all_of(self, rank: int) -> None:
        """An engine has ended, and its sessions with it."""
        for name in [name for name, at in self.rank.items() if at == rank]:
            del self.rank[name]

    def emptiest(self, ranks: Sequence[int]) -> int:
        """That of `ranks` with the fewest sessions; of equal ones the lowest."""
        counts = dict.fromkeys(ranks, 0)
        for rank in self.rank.values():
            if rank in counts:
                counts[rank] += 1
        return min(counts, key=lambda rank: (counts[rank], rank))


def _prompt_of(request: GenerateRequest) -> tuple[str, int]:
    """What completions of one prompt have in common."""
    return request.rid, hash(with_digests(request.input_ids, request.media))


def _room_number(handoff: HandoffParams | None) -> int | None:
    """The number of a handoff room; None if the room has a name or there is no handoff. After a
    slash comes the index among the prompts of one request that share a number."""
    if handoff is None:
        return None
    number = handoff.room.partition("/")[0]
    return int(number) if number.isdecimal() else None

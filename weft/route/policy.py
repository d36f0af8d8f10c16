"""Chooses the engine for a request, among several with the same model.

    open (chooses) ─▶ began (its first token) ─▶ ended

An `EngineRouter` keeps the books of what it has sent where; it asks no engine and reads no clock,
so that the front of a server and `weft sim` run the same code. It knows nothing of messages.

The names of the methods are SGLang's, but for `cache_aware`, whose cost is that of llm-d and
Dynamo: the tokens of prompts that an engine still has to compute before it gives the first token.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Sequence,
)
from typing import NamedTuple

from weft.route.index import (
    SentPrefixes,
    block_names,
)

# What an open request costs who comes next, in tokens of a prompt: the tokens that it still
# generates take time of the same steps. It spreads requests that all find their prompts.
OPEN_REQUEST_TOKENS = 48


class RoutedRequest(NamedTuple):
    """What a router sees of a request."""

    tokens: bytes  # of its prompt, int32, packed; for pictures, what tells them apart
    namespace: str = ""  # prompts share prefixes only within one
    shares_kv: bool = True  # False: no cache has its prompt
    room: int | None = None  # of a handoff between a prefill and a decode engine


class EngineBooks:
    """What a router knows of one engine."""

    def __init__(self, kv_tokens: int) -> None:
        self.num_open = 0  # requests that were sent and have not ended
        self.open_tokens = 0  # of their prompts
        self.pending_tokens = 0  # of prompts without a first token that no cache probably has
        self.num_sent = 0
        self.sent_tokens = 0
        self.sent_at = 0  # number of the last choice that was this engine
        self.index = SentPrefixes(kv_tokens)


class OpenRequest(NamedTuple):
    """What was booked for a request, to be taken back when it ends."""

    rank: int
    prompt_len: int
    pending_tokens: int


class EngineRouter:
    """Chooses by one method. Engines are numbered from 0 (`rank`)."""

    def __init__(
        self,
        method: str,
        num_engines: int,
        kv_tokens: int,
    ) -> None:
        """`method` is a key of `METHODS`; `kv_tokens` fit the memory of one engine."""
        self.engines = [EngineBooks(kv_tokens) for _ in range(num_engines)]
        self._choose = METHODS[method]
        self._reads_prompts = self._choose is cache_aware
        self._open: dict[int, OpenRequest] = {}
        self._num_choices = 0

    def open(
        self,
        id: int,
        request: RoutedRequest,
        ranks: Sequence[int],
    ) -> int:
        """Choose the engine for a request, out of `ranks`, and book it there. `ranks` is not
        empty; one that is bound to an engine has that alone."""
        names = self._names(request)
        rank = ranks[0]
        if len(ranks) > 1:
            rank = self._choose(
                self.engines,
                ranks,
                request,
                names,
            )
        self._num_choices += 1
        engine = self.engines[rank]
        prompt_len = len(request.tokens) // 4
        pending = max(prompt_len - engine.index.hit_len(names), 1)
        engine.index.add(names)
        engine.num_open += 1
        engine.open_tokens += prompt_len
        engine.pending_tokens += pending
        engine.num_sent += 1
        engine.sent_tokens += prompt_len
        engine.sent_at = self._num_choices
        self._open[id] = OpenRequest(rank, prompt_len, pending)
        return rank

    def began(self, id: int) -> None:
        """A request has its first token: its prompt has been computed."""
        request = self._open.get(id)
        if request is not None and request.pending_tokens:
            self.engines[request.rank].pending_tokens -= request.pending_tokens
            self._open[id] = request._replace(pending_tokens=0)

    def rank_of(self, id: int) -> int | None:
        """Where an open request is."""
        request = self._open.get(id)
        return None if request is None else request.rank

    def open_on(self, rank: int) -> list[int]:
        """The open requests of an engine."""
        return [id for id, request in self._open.items() if request.rank == rank]

    def ended(self, id: int) -> None:
        """A request needs nothing more. Unknown ones are ignored."""
        request = self._open.pop(id, None)
        if request is None:
            return
        engine = self.engines[request.rank]
        engine.num_open -= 1
        engine.open_tokens -= request.prompt_len
        engine.pending_tokens -= request.pending_tokens

    def forget_cache(self, rank: int) -> None:
        """An engine's prefix cache is empty: it was flushed, or the engine is a new one."""
        self.engines[rank].index.clear()

    def _names(self, request: RoutedRequest) -> list[bytes]:
        if not self._reads_prompts or not request.shares_kv:
            return []
        return block_names(request.tokens, request.namespace)


Method = Callable[[Sequence[EngineBooks], Sequence[int], RoutedRequest, Sequence[bytes]], int]


def round_robin(
    engines: Sequence[EngineBooks],
    ranks: Sequence[int],
    request: RoutedRequest,
    names: Sequence[bytes],
) -> int:
    """The one whose last request lies back furthest."""
    return min(ranks, key=lambda rank: (engines[rank].sent_at, rank))


def total_requests(
    engines: Sequence[EngineBooks],
    ranks: Sequence[int],
    request: RoutedRequest,
    names: Sequence[bytes],
) -> int:
    """The one with the fewest open requests."""
    return min(ranks, key=lambda rank: (engines[rank].num_open, engines[rank].sent_at))


def total_tokens(
    engines: Sequence[EngineBooks],
    ranks: Sequence[int],
    request: RoutedRequest,
    names: Sequence[bytes],
) -> int:
    """The one with the fewest tokens in open prompts, then in all prompts so far."""
    return min(ranks, key=lambda rank: (engines[rank].open_tokens, engines[rank].sent_tokens))


def follow_bootstrap_room(
    engines: Sequence[EngineBooks],
    ranks: Sequence[int],
    request: RoutedRequest,
    names: Sequence[bytes],
) -> int:
    """The one that the number of the room stands for, so that both sides of a handoff agree; in
    turn without a room, and where that one takes no requests."""
    if request.room is not None and request.room % len(engines) in ranks:
        return request.room % len(engines)
    return round_robin(
        engines,
        ranks,
        request,
        names,
    )


def cache_aware(
    engines: Sequence[EngineBooks],
    ranks: Sequence[int],
    request: RoutedRequest,
    names: Sequence[bytes],
) -> int:
    """The one that comes to the first token soonest: tokens to compute before it, and of the
    prompt itself, without those that are probably cached."""
    prompt_len = len(request.tokens) // 4

    def cost(rank: int) -> tuple[int, int]:
        engine = engines[rank]
        uncached = prompt_len - engine.index.hit_len(names)
        queue = engine.pending_tokens + OPEN_REQUEST_TOKENS * engine.num_open
        return queue + uncached, engine.sent_at

    return min(ranks, key=cost)


METHODS: dict[str, Method] = {
    "cache_aware": cache_aware,
    "round_robin": round_robin,
    "total_requests": total_requests,
    "total_tokens": total_tokens,
    "follow_bootstrap_room": follow_bootstrap_room,
}


def method_names() -> tuple[str, ...]:
    """Those that need no rooms."""
    return tuple(name for name in METHODS if name != "follow_bootstrap_room")


def all_method_names() -> tuple[str, ...]:
    """Those that a server offers, whose requests may have rooms."""
    return tuple(METHODS)

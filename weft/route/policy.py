"""Chooses an engine for a request, among several engines with the same model.

    open (chooses) ─▶ began (its first token) ─▶ ended

An `EngineRouter` records the requests that each engine got; it asks no engine and reads no clock,
so that the front of a server and `weft sim` run the same code. Knows no messages.

The methods have SGLang's names, except `cache_aware`. Its cost is that of llm-d and Dynamo: the
prompt tokens that an engine must still compute before the first token of the request.
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

# The cost of an open request for the next request, in prompt tokens: its decode tokens take time in
# the same steps. This cost distributes requests whose prompts are cached in all engines.
OPEN_REQUEST_TOKENS = 48


class RoutedRequest(NamedTuple):
    """The properties of a request that a router reads."""

    tokens: bytes  # int32, packed: the prompt; digests replace the tokens of pictures
    namespace: str = ""  # only prompts of the same namespace share prefixes
    shares_kv: bool = True  # False: no cache has the prompt
    room: int | None = None  # number of a handoff between a prefill and a decode engine


class EngineAccount:
    """A router's record of one engine."""

    def __init__(self, kv_tokens: int) -> None:
        self.num_open = 0  # requests that were sent and have not ended
        self.open_tokens = 0  # prompt tokens of open requests
        self.pending_tokens = 0  # probably uncached prompt tokens of requests without first token
        self.num_sent = 0  # requests so far
        self.sent_tokens = 0  # prompt tokens so far
        self.sent_at = 0  # number of the last choice of this engine
        self.index = SentPrefixes(kv_tokens)


class Elsewhere(NamedTuple):
    """An engine that had more of a prompt than the one that got the request."""

    rank: int
    num_more: int  # tokens of the prompt that it had probably cached, beyond those of the other


class OpenRequest(NamedTuple):
    """The amounts that an open request added to the record of its engine."""

    rank: int
    prompt_len: int
    pending_tokens: int
    elsewhere: Elsewhere | None


class EngineRouter:
    """Chooses engines by one method. Engines are numbered from 0 (`rank`)."""

    def __init__(
        self,
        method: str,
        num_engines: int,
        kv_tokens: int,
    ) -> None:
        """`method` is a key of `METHODS`; `kv_tokens` is the KV memory of one engine, in tokens."""
        self.engines = [EngineAccount(kv_tokens) for _ in range(num_engines)]
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
        """Choose one of the engines `ranks` for a request, record it, and return its rank.

        `ranks` is not empty; for a request that is bound to an engine, it has only that one.
        """
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
        hit_len = engine.index.hit_len(names)
        elsewhere = self._elsewhere(names, hit_len)
        pending = max(prompt_len - hit_len, 1)
        engine.index.add(names)
        engine.num_open += 1
        engine.open_tokens += prompt_len
        engine.pending_tokens += pending
        engine.num_sent += 1
        engine.sent_tokens += prompt_len
        engine.sent_at = self._num_choices
        self._open[id] = OpenRequest(rank, prompt_len, pending, elsewhere)
        return rank

    def began(self, id: int) -> None:
        """A request has its first token, so its prompt is computed. Unknown ids are ignored."""
        request = self._open.get(id)
        if request is not None and request.pending_tokens:
            self.engines[request.rank].pending_tokens -= request.pending_tokens
            self._open[id] = request._replace(pending_tokens=0)

    def _elsewhere(self, names: Sequence[bytes], hit_len: int) -> Elsewhere | None:
        """The engine with the most of a prompt, if that is more than `hit_len` tokens."""
        if not names:
            return None
        lens = [engine.index.hit_len(names) for engine in self.engines]
        most = max(lens)
        if most <= hit_len:
            return None
        return Elsewhere(lens.index(most), most - hit_len)

    def elsewhere(self, id: int) -> Elsewhere | None:
        """The engine that had more of the prompt of an open request than its own, if the method
        reads prompts."""
        request = self._open.get(id)
        return None if request is None else request.elsewhere

    def rank_of(self, id: int) -> int | None:
        """The engine of an open request; None for an unknown id."""
        request = self._open.get(id)
        return None if request is None else request.rank

    def open_on(self, rank: int) -> list[int]:
        """The open requests of an engine."""
        return [id for id, request in self._open.items() if request.rank == rank]

    def ended(self, id: int) -> None:
        """A request has ended. Unknown ids are ignored."""
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


Method = Callable[[Sequence[EngineAccount], Sequence[int], RoutedRequest, Sequence[bytes]], int]


def round_robin(
    engines: Sequence[EngineAccount],
    ranks: Sequence[int],
    request: RoutedRequest,
    names: Sequence[bytes],
) -> int:
    """The engine that got its last request the longest time ago."""
    return min(ranks, key=lambda rank: (engines[rank].sent_at, rank))


def total_requests(
    engines: Sequence[EngineAccount],
    ranks: Sequence[int],
    request: RoutedRequest,
    names: Sequence[bytes],
) -> int:
    """The engine with the fewest open requests."""
    return min(ranks, key=lambda rank: (engines[rank].num_open, engines[rank].sent_at))


def total_tokens(
    engines: Sequence[EngineAccount],
    ranks: Sequence[int],
    request: RoutedRequest,
    names: Sequence[bytes],
) -> int:
    """The engine with the fewest tokens in open prompts, then in all prompts so far."""
    return min(ranks, key=lambda rank: (engines[rank].open_tokens, engines[rank].sent_tokens))


def follow_bootstrap_room(
    engines: Sequence[EngineAccount],
    ranks: Sequence[int],
    request: RoutedRequest,
    names: Sequence[bytes],
) -> int:
    """The engine with the number of the room modulo the number of engines, so that both sides of a
    handoff agree. Without a room, or if that engine takes no requests: `round_robin`."""
    if request.room is not None and request.room % len(engines) in ranks:
        return request.room % len(engines)
    return round_robin(
        engines,
        ranks,
        request,
        names,
    )


def cache_aware(
    engines: Sequence[EngineAccount],
    ranks: Sequence[int],
    request: RoutedRequest,
    names: Sequence[bytes],
) -> int:
    """The engine with the fewest tokens to compute until the request's first token: those of
    earlier requests, and the tokens of its own prompt that are probably not cached."""
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
    """The methods that need no rooms."""
    return tuple(name for name in METHODS if name != "follow_bootstrap_room")


def all_method_names() -> tuple[str, ...]:
    """The methods of a server, whose requests may have rooms."""
    return tuple(METHODS)

"""Which engine gets a request: the methods by their counts, and what the router's books say."""

from __future__ import annotations

import random

import numpy as np
import pytest

from weft.route.index import BLOCK_LEN, SentPrefixes, block_names
from weft.route.policy import (
    METHODS,
    OPEN_REQUEST_TOKENS,
    Elsewhere,
    EngineRouter,
    RoutedRequest,
)

KV_TOKENS = 100_000


def prompt(key: int, length: int) -> RoutedRequest:
    """Prompts of one key begin alike, those of two keys have nothing in common."""
    tokens = np.random.default_rng(key).integers(0, 30_000, 4_096, dtype=np.int32)
    return RoutedRequest(tokens[:length].tobytes())


def lengths(num: int) -> list[int]:
    found = np.random.default_rng(1).lognormal(5.0, 1.0, num)
    return np.clip(found, 1, 4_000).astype(int).tolist()


def test_round_robin_counts_differ_by_one_at_most() -> None:
    router = EngineRouter("round_robin", 3, KV_TOKENS)
    for id, length in enumerate(lengths(500)):
        router.open(id, prompt(id, length), range(3))
    counts = [engine.num_sent for engine in router.engines]
    assert max(counts) - min(counts) <= 1


def test_round_robin_gives_each_engine_its_turn_again_after_it_was_away() -> None:
    router = EngineRouter("round_robin", 3, KV_TOKENS)
    ranks = [router.open(id, prompt(id, 10), [0, 2]) for id in range(4)]
    ranks += [router.open(id, prompt(id, 10), range(3)) for id in range(4, 8)]
    assert ranks == [0, 2, 0, 2, 1, 0, 2, 1]


def test_total_requests_fills_the_engine_with_the_fewest_open_ones() -> None:
    router = EngineRouter("total_requests", 2, KV_TOKENS)
    for id in range(6):
        router.open(id, prompt(id, 10), range(2))
    for id in (1, 3, 5):
        router.ended(id)
    assert [router.open(id, prompt(id, 10), range(2)) for id in (6, 7, 8)] == [1, 1, 1]
    assert [engine.num_open for engine in router.engines] == [3, 3]


@pytest.mark.parametrize("most_open", [1, 8, 64])
def test_total_tokens_shares_tokens_within_a_tenth(most_open: int) -> None:
    router = EngineRouter("total_tokens", 2, KV_TOKENS)
    for id, length in enumerate(lengths(500)):
        router.open(id, prompt(id, length), range(2))
        router.ended(id - most_open)
    tokens = [engine.sent_tokens for engine in router.engines]
    assert max(tokens) / min(tokens) <= 1.1


def test_a_room_chooses_the_engine_while_that_is_there() -> None:
    router = EngineRouter("follow_bootstrap_room", 4, KV_TOKENS)
    asked = [prompt(0, 10)._replace(room=room) for room in (7, 2, 7)]
    assert [router.open(id, one, range(4)) for id, one in enumerate(asked)] == [3, 2, 3]
    assert router.open(3, asked[0], [0, 1]) == 0


def test_a_prompt_goes_where_its_beginning_was_sent() -> None:
    router = EngineRouter("cache_aware", 4, KV_TOKENS)
    first = [router.open(key, prompt(key, 1_000), range(4)) for key in range(4)]
    assert sorted(first) == [0, 1, 2, 3]
    again = [router.open(10 + key, prompt(key, 1_500), range(4)) for key in range(4)]
    assert again == first


def test_prompts_of_two_namespaces_do_not_meet() -> None:
    router = EngineRouter("cache_aware", 2, KV_TOKENS)
    one = prompt(0, 1_000)
    assert router.open(0, one, range(2)) == 0
    assert router.open(1, one._replace(namespace="b"), range(2)) == 1


def test_a_long_queue_outweighs_a_cached_prompt() -> None:
    router = EngineRouter("cache_aware", 2, KV_TOKENS)
    assert router.open(0, prompt(0, 500), range(2)) == 0
    router.began(0)
    assert router.open(1, prompt(1, 300), [0]) == 0
    assert router.open(2, prompt(0, 500), range(2)) == 0
    assert router.open(3, prompt(2, 2_000), [0]) == 0
    assert router.open(4, prompt(0, 500), range(2)) == 1


class PlainRouter:
    """The methods as they are described, worked out anew for each request from all that
    happened."""

    def __init__(self, method: str, num: int) -> None:
        self.method = method
        self.num = num
        self.sent: list[tuple[int, int, RoutedRequest]] = []  # id, rank, request
        self.begun: set[int] = set()
        self.ended: set[int] = set()
        self.uncached: dict[int, int] = {}

    def uncached_len(self, rank: int, request: RoutedRequest) -> int:
        """Tokens of a prompt behind the longest beginning, in whole blocks, of one sent there."""
        tokens = np.frombuffer(request.tokens, np.int32)
        longest = 0
        for _, at, other in self.sent:
            if at == rank and other.namespace == request.namespace and other.shares_kv:
                theirs = np.frombuffer(other.tokens, np.int32)
                shortest = min(len(tokens), len(theirs))
                differs = np.flatnonzero(tokens[:shortest] != theirs[:shortest])
                shared = int(differs[0]) if len(differs) else shortest
                longest = max(longest, shared // BLOCK_LEN * BLOCK_LEN)
        return len(tokens) - (longest if request.shares_kv else 0)

    def open(self, id: int, request: RoutedRequest, ranks: list[int]) -> int:
        rank = min(ranks, key=lambda one: self.key(one, request, ranks))
        self.uncached[id] = max(self.uncached_len(rank, request), 1)
        self.sent.append((id, rank, request))
        return rank

    def key(self, rank: int, request: RoutedRequest, ranks: list[int]) -> tuple[int, ...]:
        on = [(id, one) for id, at, one in self.sent if at == rank]
        lens = {id: len(one.tokens) // 4 for id, one in on}
        still = [id for id, _ in on if id not in self.ended]
        latest = max((i + 1 for i, (_, at, _) in enumerate(self.sent) if at == rank), default=0)
        match self.method:
            case "total_requests":
                return len(still), latest, rank
            case "total_tokens":
                return sum(lens[id] for id in still), sum(lens.values()), rank
            case "cache_aware":
                queue = sum(self.uncached[id] for id in still if id not in self.begun)
                cost = queue + OPEN_REQUEST_TOKENS * len(still)
                return cost + self.uncached_len(rank, request), latest, rank
            case "follow_bootstrap_room" if request.room is not None:
                wanted = request.room % self.num
                if wanted in ranks:
                    return (int(rank != wanted),)
        return latest, rank


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(4))
def test_a_method_chooses_as_its_description_says(method: str, seed: int) -> None:
    rng = random.Random(seed)
    router = EngineRouter(method, 3, KV_TOKENS)
    plain = PlainRouter(method, 3)
    for id in range(120):
        one = prompt(rng.randrange(4), rng.choice([5, 40, 64, 65, 200, 600]))
        one = one._replace(
            namespace=rng.choice(["", "", "b"]),
            shares_kv=rng.random() < 0.9,
            room=rng.choice([None, rng.randrange(9)]),
        )
        ranks = sorted(rng.sample(range(3), rng.choice([1, 2, 3, 3])))
        assert router.open(id, one, ranks) == plain.open(id, one, ranks)
        assert router.rank_of(id) == plain.sent[-1][1]
        for other in rng.sample(range(id + 1), min(id + 1, rng.randrange(4))):
            if rng.random() < 0.5 and other not in plain.ended:
                router.began(other)
                plain.begun.add(other)
            elif rng.random() < 0.6:
                router.ended(other)
                plain.ended.add(other)
        for rank in range(3):
            still = [a for a, at, _ in plain.sent if at == rank and a not in plain.ended]
            assert router.open_on(rank) == still


def test_requests_that_all_find_their_prompt_are_spread() -> None:
    router = EngineRouter("cache_aware", 2, KV_TOKENS)
    for id in range(40):
        router.open(id, prompt(0, 10 * OPEN_REQUEST_TOKENS), range(2))
        router.began(id)
    counts = [engine.num_open for engine in router.engines]
    assert max(counts) - min(counts) <= 12


def test_books_are_empty_when_all_has_ended() -> None:
    for method in METHODS:
        router = EngineRouter(method, 3, KV_TOKENS)
        for id, length in enumerate(lengths(60)):
            router.open(id, prompt(id % 7, length), range(3))
            if id % 2:
                router.began(id)
        for id in range(60):
            router.ended(id)
            router.ended(id)
        for engine in router.engines:
            assert engine.num_open == 0
            assert engine.open_tokens == 0
            assert engine.pending_tokens == 0


def test_an_index_forgets_ends_of_prompts_before_their_beginnings() -> None:
    index = SentPrefixes(10 * BLOCK_LEN)
    old = block_names(prompt(0, 8 * BLOCK_LEN).tokens)
    index.add(old)
    index.add(block_names(prompt(1, 6 * BLOCK_LEN).tokens))
    assert len(index) == 10
    assert index.hit_len(old) == 4 * BLOCK_LEN


def test_only_whole_blocks_have_names() -> None:
    names = block_names(prompt(0, 3 * BLOCK_LEN - 1).tokens)
    assert len(names) == 2
    assert names == block_names(prompt(0, 3 * BLOCK_LEN).tokens)[:2]


def test_an_engine_that_had_more_of_a_prompt_is_known_while_the_request_is_open() -> None:
    router = EngineRouter("cache_aware", 3, KV_TOKENS)
    router.open(0, prompt(1, 640), [2])
    assert router.elsewhere(0) is None, "nobody had any of it"
    router.open(1, prompt(1, 640), [0])
    assert router.elsewhere(1) == Elsewhere(2, 640)
    router.open(2, prompt(1, 960), [0])
    assert router.elsewhere(2) is None, "it has as much as the other"
    router.open(3, prompt(1, 960), [1, 2])
    assert router.elsewhere(3) == Elsewhere(0, 960), "the engine with nothing to do has it"
    router.ended(3)
    assert router.elsewhere(3) is None


def test_a_method_that_reads_no_prompts_knows_no_other_engine() -> None:
    router = EngineRouter("round_robin", 2, KV_TOKENS)
    for id in range(4):
        router.open(id, prompt(1, 640), range(2))
        assert router.elsewhere(id) is None

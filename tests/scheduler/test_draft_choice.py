"""A model that guesses is not given up by chance, is found again after it was wrong, and never
makes other sources worse. Steps take virtual time."""

from __future__ import annotations

import numpy as np
import pytest

from tests.scheduler.draft_oracle import DraftOracle
from tests.scheduler.oracle_runner import expected_output
from tests.scheduler.scenes import settings
from tests.scheduler.world import VOCAB, World
from tests.seeds import every_second
from weft.memory.radix.cache import RadixCache
from weft.plan.step import Plan
from weft.scheduler import build
from weft.scheduler.settings import DraftSettings
from weft.scheduler.speculation.guessing import TRY_AGAIN_STEPS
from weft.scheduler.speculation.sources import DraftSource, Known, ModelDrafts

FIRST_TOKENS = 4  # that another source is sure of, of each piece
PIECE = 12  # tokens
IS_WRONG = np.random.default_rng(7).random(600) < 0.3  # [600] by place


class Quoting:
    """Knows the beginning of each piece of an answer, and is wrong about three of ten tokens."""

    option = "ngram"
    is_decided = False
    prior = 0.6

    def __init__(self, *, is_sure: bool) -> None:
        self._is_sure = is_sure  # never wrong

    def drafts(self, known: Known, num_tokens: int) -> bytes:
        tokens = np.frombuffer(known.tokens, dtype=np.int32)
        if len(tokens) % PIECE >= FIRST_TOKENS:
            return b""
        prompt = tokens[: known.request.spec.prompt_len].tolist()
        right = [*prompt, *expected_output(prompt, 400, VOCAB, set())]
        found = np.array(right[len(tokens) : len(tokens) + num_tokens], dtype=np.int32)
        places = len(tokens) + np.arange(len(found))
        is_wrong = IS_WRONG[places] & (not self._is_sure)
        return np.where(is_wrong, (found + 1) % VOCAB, found).astype(np.int32).tobytes()

    def forget(self, request: object) -> None:
        pass


def oracle(world: World) -> DraftOracle:
    assert world.runner.draft is not None
    return world.runner.draft


def seconds(plan: Plan) -> float:
    """As of a small model with a head, measured on a CPU."""
    if plan.drafting is None:
        return 0.0100 + 0.0003 * plan.num_tokens
    num_passes = max(int(plan.drafting.counts.max(initial=0)), 1)
    num_tokens = plan.num_tokens + len(plan.drafting.slots)
    return 0.0004 + 0.0004 * num_passes + 0.00005 * num_tokens


def world_of(names: str, monkeypatch: pytest.MonkeyPatch, *, is_sure: bool = False) -> World:
    """A world with these sources, of which `ngram` is the one of this file."""

    def mine(chosen: tuple[str, ...], cache: RadixCache, *lengths: int) -> list[DraftSource]:
        made: list[DraftSource] = [ModelDrafts(name) for name in chosen if name == "draft"]
        return [*made, Quoting(is_sure=is_sure)] if "ngram" in chosen else made

    monkeypatch.setattr(build, "make_sources", mine)
    draft = None
    if "draft" in names:
        draft = DraftSettings(vocab_size=VOCAB, context_length=1_000)
    world = World(
        settings(
            speculative=names,
            draft=draft,
            num_pages=8_000,
            max_running_requests=32,
            chunked_prefill_size=1_024,
        )
    )
    world.tick_s = 0.0
    world.let_steps_cost(seconds)
    return world


def right(world: World, part: str) -> None:
    """Let the model that guesses be right so often."""
    if world.runner.draft is None:
        return
    kinds = {"never": (1, 0), "a third": (0, 3), "half": (2, 0), "nearly always": (8, 0)}
    oracle(world).wrong_every, oracle(world).right_every = kinds[part]


def time_of(world: World, num_requests: int, num_rounds: int, length: int, first: int = 0) -> float:
    """Seconds that rounds of requests take, which run together."""
    began_s = world.time
    for number in range(num_rounds):
        for i in range(num_requests):
            prompt = [first + number, *range(i, i + 8)]
            world.send(prompt, max_new_tokens=length, ignore_eos=True)
        while world.has_work:
            world.step(check=False)
    return world.time - began_s


def speed(
    names: str,
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_requests: int = 1,
    num_rounds: int = 5,
    length: int = 120,
) -> float:
    """How much faster these sources make the world, from its first step."""
    plain_s = time_of(world_of("off", monkeypatch), num_requests, num_rounds, length)
    world = world_of(names, monkeypatch)
    right(world, part)
    return plain_s / time_of(world, num_requests, num_rounds, length)


@pytest.mark.parametrize(
    ("part", "least"), [("never", 0.975), ("a third", 1.13), ("half", 1.37), ("nearly always", 2.8)]
)
def test_one_stream_is_faster_by_what_is_right(
    part: str, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert speed("draft", part, monkeypatch) >= least


@pytest.mark.parametrize("num_requests", [1, 32])
@pytest.mark.parametrize("part", every_second(["never", "a third", "half", "nearly always"]))
def test_beside_another_source_nothing_is_lost(
    part: str, num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = {"num_requests": num_requests, "num_rounds": 5 if num_requests == 1 else 1}
    alone = speed("ngram", part, monkeypatch, **load, length=120)
    both = speed("draft,ngram", part, monkeypatch, **load, length=120)
    assert both >= 0.98 * alone
    assert both >= 0.98


def test_no_guess_is_made_where_another_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = world_of("draft,ngram", monkeypatch, is_sure=True)
    oracle(world).wrong_every = 0
    asked: list[int] = []
    execute = oracle(world).execute

    def noted(plan: Plan, drafting: object) -> object:
        asked.append(int(plan.starts[0] + plan.lens[0]) % PIECE)
        return execute(plan, drafting)  # type: ignore[arg-type]

    oracle(world).execute = noted  # type: ignore[method-assign, assignment]
    time_of(world, 1, 4, 120)
    del asked[: len(asked) // 2]  # until both are known
    where_known = [place for place in asked if place < FIRST_TOKENS]
    assert len(where_known) < len(asked) / 10


def test_what_was_wrong_for_long_is_used_again_soon_after_it_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = world_of("draft", monkeypatch)
    right(world, "never")
    time_of(world, 1, 6, 100)
    num_right = world.scheduler.stats().total_accepted_draft
    assert num_right == 0
    right(world, "half")
    before = world.num_steps
    while not world.scheduler.stats().total_accepted_draft > 50:
        time_of(world, 1, 1, 100, first=100 + world.num_steps % 97)
    assert world.num_steps - before < 20 * TRY_AGAIN_STEPS

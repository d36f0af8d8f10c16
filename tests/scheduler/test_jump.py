"""Forced tokens: they follow without being sampled, are computed together in the next step, and
change nothing else.

The grammar of these tests forces at its whim: how many tokens follow an output of some length, and
which, is a function of the request and that length. The model is the oracle, so every output says
whether K and V are those of its tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.engine.engine_world import EngineWorld
from tests.scheduler.oracle_runner import expected_output, extend_hash, next_token
from tests.scheduler.random_worlds import random_prompt, random_settings, with_drafts
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.scenes import settings
from tests.scheduler.world import EOS, VOCAB, World
from tests.seeds import seeds, slow
from weft.arrays import or_zeros
from weft.grammar.masks import LazyBitmaskRow, LazyBitmasks, Words
from weft.grammar.protocol import Advance, CompileResult, Constraint, Key
from weft.messages.requests import Abort
from weft.messages.sampling import Grammar
from weft.plan.step import ForwardMode, Plan
from weft.scheduler.features.grammar import MAX_JUMP

PROMPT = list(range(10, 40))
ANYTHING: Words = np.full(-(-VOCAB // 32), -1, dtype=np.int32)


def whim(name: str, length: int) -> list[int]:
    """What must follow the first `length` tokens of the output."""
    rng = random.Random(f"{name} {length}")
    number = rng.choice([0, 0, 1, 2, 5, 20, 50])
    return [rng.randrange(VOCAB) for _ in range(number)]


class Place:
    """A matcher that is only a name and a length."""

    error = ""
    is_complete = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.length = 0

    def fork(self) -> Place:
        return Place(self.name)

    def consume(self, token: int) -> bool:
        self.length += 1
        return True

    def forced(self) -> list[int]:
        return whim(self.name, self.length)


class Whims:
    """Every token is allowed; the key of a grammar is its name."""

    def __init__(self) -> None:
        self._asked: list[CompileResult] = []

    def ask(self, id: int, key: Key, tenant: str = "") -> None:
        self._asked.append(
            CompileResult(
                id, Constraint(Place(key.text), LazyBitmaskRow(LazyBitmasks(ANYTHING[None])))
            )
        )

    def cancel(self, id: int) -> None:
        self._asked = [verdict for verdict in self._asked if verdict.id != id]

    def take(self) -> list[CompileResult]:
        asked, self._asked = self._asked, []
        return asked

    def advance(
        self, constraints: Sequence[Constraint], tokens: Sequence[int], room: Sequence[int]
    ) -> list[Advance]:
        moves = []
        for constraint, limit in zip(constraints, room, strict=True):
            constraint.matcher.consume(0)
            forced = tuple(constraint.matcher.forced()[:limit])
            for token in forced:
                constraint.matcher.consume(token)
            moves.append(Advance(forced=forced))
        return moves

    def follow(
        self, constraint: Constraint, tokens: Sequence[int], *, jumps: bool
    ) -> list[LazyBitmaskRow]:
        place = constraint.matcher
        assert isinstance(place, Place)
        count = 0
        while count < len(tokens) and not (jumps and whim(place.name, place.length + count + 1)):
            count += 1
        return [constraint.mask] * count


def whimsical(name: str, **more: Any) -> dict[str, Any]:
    return {"grammar": Grammar("ebnf", name), **more}


def expected(prompt: list[int], name: str, max_new: int, stops: set[int]) -> list[int]:
    """What one request says on its own: the oracle's token, then what must follow it."""
    state = 0
    output = []
    for token in prompt:
        state = extend_hash(state, token)
    while True:
        token = next_token(state, VOCAB)
        room = min(MAX_JUMP, max_new - len(output) - 1)
        for following in [token, *whim(name, len(output) + 1)[:room]]:
            output.append(following)
            if following in stops or len(output) == max_new:
                return output
            state = extend_hash(state, following)


def guessed(rng: random.Random, prompt: list[int], name: str) -> list[int]:
    """What a client expects: the answer, with some tokens that are wrong."""
    answer = expected(prompt, name, 100, set())
    return [rng.randrange(VOCAB) if rng.random() < 0.1 else token for token in answer]


def check(world: World) -> None:
    """All that `World.check_outputs` says, for requests with whims."""
    for id, request in world.sent.items():
        params = request.sampling
        finish = world.finished[id]
        if params.grammar is None:
            assert world.outputs[id] == expected_output(world.prompts[id], 150, VOCAB, set())
            continue
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
        max_new = params.max_new_tokens or world.scheduler.limits.max_len - len(world.prompts[id])
        wanted = expected(world.prompts[id], params.grammar.text, max_new, stops)
        assert world.outputs[id] == wanted[: len(world.outputs[id])], f"request {id}"
        if finish.reason in ("stop", "length"):
            assert world.outputs[id] == wanted
            matched = wanted[-1] if wanted[-1] in stops else None
            assert finish.reason == ("length" if matched is None else "stop")
            assert finish.completion_tokens == len(wanted)
            assert finish.matched == matched


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("seed", [*seeds(2, 16), 16, *slow([17])])
def test_at_random_forced_tokens_keep_every_invariant_and_are_replayed_bit_for_bit(
    seed: int, drafts: bool
) -> None:
    rng = random.Random(f"jump {seed}")
    settings = random_settings(rng)
    guesses = random.Random(f"guesses of jump {seed}")
    if drafts:
        settings = with_drafts(settings, guesses)
    world = RecordedWorld(settings, depth=rng.choice([0, 1, 2]), grammars=Whims())
    puts_aside = seed >= 16  # which makes many files
    if puts_aside:
        world.put_aside_often()
    if drafts:
        world.let_steps_cost(lambda plan: 0.001 + 0.0001 * plan.num_tokens)
    elif world.settings.max_step_s:
        world.let_steps_cost(lambda plan: 0.001 + 0.0005 * plan.num_tokens)
    families = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(3)]
    for number in range(12 if puts_aside else 40):
        prompt = random_prompt(rng, families, world.scheduler.limits.max_len - 2)
        world.send(
            prompt,
            **whimsical(f"{seed}.{number}"),
            prediction=guessed(guesses, prompt, f"{seed}.{number}") if drafts else [],
            max_new_tokens=rng.choice(
                [None, rng.randrange(1, world.scheduler.limits.max_len - len(prompt) + 1)]
            ),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=(7,) if rng.random() < 0.2 else (),
        )
        for _ in range(rng.choice([0, 0, 1, 5])):
            world.step()
        if rng.random() < 0.05:
            world.abort(Abort(ids=(rng.randrange(number + 1),)))
    world.run_dry()
    world.check_idle()
    check(world)
    world.replay()


def test_the_random_worlds_jump_mix_and_retract() -> None:
    world = EngineWorld(
        settings(
            **{"num_pages": 350, "max_running_requests": 16, "schedule_conservativeness": 0.0},
            **{"mixed_chunk": True, "chunked_prefill_size": 64},
        ),
        grammars=Whims(),
    )
    modes = set()
    jumps = 0
    launch = world.runner.launch

    def watch(plan: Plan) -> Any:
        nonlocal jumps
        jumps += int((plan.lens[plan.tokens[np.cumsum(plan.lens) - 1] >= 0] > 1).sum())
        modes.add(plan.mode)
        return launch(plan)

    world.runner.launch = watch  # type: ignore[method-assign]
    for number in range(30):
        world.send(
            [number, *PROMPT], **whimsical(f"m{number}"), max_new_tokens=150, ignore_eos=True
        )
        if number > 20:
            world.step()
    world.run_dry()
    check(world)
    assert modes == {ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED}
    assert world.scheduler.counters.num_retractions
    assert jumps > 100


def test_drafts_stand_behind_forced_tokens_and_end_where_others_are_forced() -> None:
    world = EngineWorld(settings(speculative="prediction"), grammars=Whims())
    world.let_steps_cost(lambda plan: 0.01 + 0.0001 * plan.num_tokens)
    plans: list[Plan] = []
    launch = world.runner.launch

    def watch(plan: Plan) -> Any:
        plans.append(plan)
        return launch(plan)

    world.runner.launch = watch  # type: ignore[method-assign]
    for number in range(40):
        name = f"d{number}"
        prompt = [number, *PROMPT]
        guess = expected(prompt, name, 100, set())
        world.send(prompt, **whimsical(name), prediction=guess, max_new_tokens=100, ignore_eos=True)
        world.run_dry()
    check(world)
    drafted = [plan for plan in plans if plan.drafts is not None]
    beside = [plan for plan in drafted if (plan.lens - plan.drafts > 1).any()]
    assert len(drafted) > 60
    assert len(beside) > 20
    stats = world.scheduler.stats()
    assert stats.total_accepted_prediction == stats.total_drafts_prediction > 100


def test_a_jump_saves_a_step_for_each_forced_token() -> None:
    world = EngineWorld(settings(), grammars=Whims())
    name = next(
        f"j{i}" for i in range(1_000) if len(whim(f"j{i}", 1)) == 20 and not whim(f"j{i}", 22)
    )
    world.send(PROMPT, **whimsical(name), max_new_tokens=23, ignore_eos=True)
    world.run_dry()
    check(world)
    assert (
        world.scheduler.counters.steps.num_all == 3
    )  # the prompt and a token; 21 tokens and another; that and the last
    assert world.engine.services.stats().total_forced_tokens == 20


@pytest.mark.parametrize("speculative", ["off", "prediction"])
def test_forced_tokens_are_computed_in_pieces_beside_a_stream(speculative: str) -> None:
    bounds = {"max_slowdown": 2.5, "mixed_chunk": True, "speculative": speculative}
    world = EngineWorld(settings(**bounds), grammars=Whims())
    world.let_steps_cost(lambda plan: 0.010 + 0.002 * plan.num_tokens)
    plans: list[Plan] = []
    launch = world.runner.launch

    def watch(plan: Plan) -> Any:
        plans.append(plan)
        return launch(plan)

    world.runner.launch = watch  # type: ignore[method-assign]
    for number in range(12):
        if number == 2:
            plans.clear()  # of prompts that show what a token costs
        world.send(PROMPT, max_new_tokens=150, ignore_eos=True)
        for _ in range(6):
            world.step()
        name = f"p{number}"
        prompt = [number, *PROMPT]
        guess = expected(prompt, name, 60, set())
        world.send(prompt, **whimsical(name), prediction=guess, max_new_tokens=60, ignore_eos=True)
        world.run_dry()
    check_time(plans)
    check(world)


def check_time(plans: list[Plan]) -> None:
    """Steps of two requests have room for ten more tokens: 2.5 times (10 + 2 * 2) ms."""
    beside = [plan for plan in plans if len(plan.lens) > 1]
    assert max(plan.num_tokens - int(or_zeros(plan.drafts, 1).sum()) for plan in beside) <= 18
    assert sum(not plan.samples.all() for plan in beside) > 20


def test_a_request_that_wants_log_probabilities_does_not_jump() -> None:
    world = EngineWorld(settings(), grammars=Whims())
    world.send(PROMPT, **whimsical("logprobs"), max_new_tokens=20, ignore_eos=True, logprobs=0)
    world.run_dry()
    assert world.scheduler.counters.steps.num_all == 20

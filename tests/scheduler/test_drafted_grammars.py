"""Drafts of requests with a grammar: each token is what it would be without drafts, also where the
reasoning ends inside of a draft, and only what is kept is taken by the grammar."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from tests.engine.engine_world import EngineWorld
from tests.scheduler.grammars import PROMPT, VOCABULARY, Bench, obey_masks, until_compiled
from tests.scheduler.obeying import obey
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.scenes import settings
from tests.scheduler.world import EOS, VOCAB, World
from tests.seeds import seeds
from weft.grammar.protocol import CompileResult, Constraint, Key
from weft.messages.requests import Abort
from weft.messages.sampling import Grammar, ThinkingMarks
from weft.plan.logits import GrammarMask
from weft.plan.step import Plan, Result, find

BEGIN = 261
END_1 = 262
END_2 = 263
SOURCES = "prediction,tree,ngram"


class Patient:
    """A grammar service that answers at once, however long it takes."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._num_open = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bench.pool, name)

    def ask(self, id: int, key: Key, tenant: str = "") -> None:
        self._num_open += 1
        self._bench.pool.ask(id, key, tenant)

    def cancel(self, id: int) -> None:
        raise AssertionError("it was answered")

    def take(self) -> list[CompileResult]:
        results: list[CompileResult] = []
        while len(results) < self._num_open:
            results += self._bench.pool.take()
            if len(results) < self._num_open:
                assert self._bench.rung.wait(240)
                self._bench.rung.clear()
        self._num_open = 0
        return results


def often_end(world: World) -> None:
    """The model likes the marks of reasoning, and says each in a part of all places."""
    execute = world.runner.execute
    liked = {0: BEGIN, 1: END_1, 2: END_2, 3: END_2}

    def liking(plan: Plan) -> Result:
        result = execute(plan)
        tokens = np.array([liked.get(token % 9, token) for token in result.tokens.tolist()])
        tokens = tokens.astype(np.int32)
        rows = np.repeat(plan.rows, plan.num_sampled)
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            world.runner.last[row] = token
        return Result(tokens)

    world.runner.execute = liking  # type: ignore[method-assign]


def model(world: World) -> None:
    """The oracle, with a liking for marks, under what its plans ask for."""
    often_end(world)
    obey_masks(world.runner)
    obey(world.runner)


def texts(rng: random.Random) -> list[str]:
    """Choices that share pieces, so that some of their tokens are forced and others are not."""
    pieces = ["a", "ab", "b", "abba", "aab"]
    return ["".join(rng.choice(pieces) for _ in range(rng.randrange(1, 14))) for _ in range(24)]


def wish(rng: random.Random) -> dict[str, Any]:
    marks = None
    end = rng.choice([(END_2,), (END_1, END_2)])
    if rng.random() < 0.6:
        marks = ThinkingMarks((BEGIN,), end, is_open=rng.random() < 0.7)
    found: dict[str, Any] = {
        "grammar": Grammar("choice", json.dumps(texts(rng)), behind=marks),
        "max_new_tokens": rng.choice([1, 5, 20, 60]),
        "ignore_eos": rng.random() < 0.5,
        "stop_token_ids": (4 + ord("b"),) if rng.random() < 0.1 else (),
    }
    if marks is not None and rng.random() < 0.5:
        found["thinking_budget"] = rng.choice([1, 3, 10])
        found["thinking_marks"] = marks
    if rng.random() < 0.2:
        found["min_new_tokens"] = 4
    return found


def answers(
    seed: int, bench: Bench, expects: list[list[int]] | None, **changes: Any
) -> tuple[RecordedWorld, list[tuple[list[int], str]]]:
    rng = random.Random(f"drafted grammars {seed}")
    depth = rng.choice([0, 1])
    changes |= rng.choice([{}, {"num_pages": 150, "schedule_conservativeness": 0.0}])
    changes |= rng.choice([{}, {"mixed_chunk": True, "chunked_prefill_size": 16}])
    world = RecordedWorld(settings(**changes), depth, grammars=Patient(bench))
    world.let_steps_cost(lambda plan: 0.01 + 0.0001 * plan.num_tokens)
    model(world)
    if seed == 0:
        world.put_aside_often()
    for number in range(30):
        prediction = expects[number] if expects is not None else []
        world.send([*PROMPT, number % 5], prediction=prediction, **wish(rng))
        if rng.random() < 0.3:
            world.step()
    world.run_dry()
    world.check_idle()
    return world, [(world.outputs[id], world.finished[id].reason) for id in range(30)]


@pytest.mark.parametrize("seed", seeds(3, 16))
def test_at_random_drafts_under_grammars_change_no_token_and_are_replayed(seed: int) -> None:
    bench = Bench()
    try:
        _, plain = answers(seed, bench, None, speculative="off")
        rng = random.Random(seed)
        expects = [
            [rng.randrange(VOCAB) if rng.random() < 0.05 else token for token in output]
            for output, _ in plain
        ]
        world, drafted = answers(seed, bench, expects, speculative=SOURCES)
        assert drafted == plain
        assert world.scheduler.stats().total_accepted_prediction > 4
        world.replay()
    finally:
        bench.pool.close()


def masked_places(plan: Plan) -> list[int]:
    mask = find(plan.logits, GrammarMask)
    return [] if mask is None else mask.index.tolist()


def test_a_grammar_begins_to_hold_inside_of_the_draft_in_which_the_reasoning_ends() -> None:
    bench = Bench()
    said = [5, 6, 7, END_1, END_2, *(4 + ord(letter) for letter in "yes")]
    marks = ThinkingMarks((BEGIN,), (END_1, END_2), is_open=True)
    grammar = Grammar("choice", json.dumps(["yes", "yellow", "no"]), behind=marks)
    world = EngineWorld(settings(speculative="prediction"), grammars=bench.pool)
    world.let_steps_cost(lambda plan: 0.01 + 0.0001 * plan.num_tokens)
    prompt_len = len(PROMPT)
    plans: list[Plan] = []
    execute = world.runner.execute

    def scripted(plan: Plan) -> Result:
        plans.append(plan)
        positions = plan.sampling.positions - prompt_len
        tokens = np.array([said[place] if 0 <= place < len(said) else EOS for place in positions])
        execute(plan)
        counts = plan.num_sampled.astype(np.int32)
        begins = np.cumsum(counts) - counts
        world.runner.last[plan.rows[counts > 0]] = tokens[begins[counts > 0]]
        return Result(tokens.astype(np.int32))

    world.runner.execute = scripted  # type: ignore[method-assign]
    world.send([9, 8, 7], max_new_tokens=3, ignore_eos=True)
    world.run_dry()
    plans.clear()
    id = world.send(PROMPT, grammar=grammar, prediction=said, max_new_tokens=40)
    until_compiled(world, bench)
    world.run_dry()
    bench.pool.close()
    assert world.outputs[id] == said
    assert world.finished[id].reason == "stop"
    [drafted] = [plan for plan in plans if plan.drafts is not None and plan.drafts[0] > 3]
    # Behind the draft that ends the reasoning and each one behind it, and nowhere before.
    first = len(said) - len("yes") - int(drafted.sampling.positions[0] - prompt_len)
    num_sampled = len(drafted.sampling.seeds)
    assert 0 < first < num_sampled
    assert masked_places(drafted) == list(range(first, num_sampled))


def ready(bench: Bench, *choices: str) -> Constraint:
    bench.pool.ask(0, Key("choice", json.dumps(choices)))
    results: list[CompileResult] = []
    while not results:
        assert bench.rung.wait(240)
        results = bench.pool.take()
    constraint = results[0].constraint
    assert constraint is not None
    return constraint


def allowed(words: np.ndarray) -> str:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return b"".join(VOCABULARY[token] for token in np.flatnonzero(bits)).decode()


def test_a_draft_goes_as_far_as_there_is_a_choice_and_the_place_stays() -> None:
    bench = Bench()
    constraint = ready(bench, "abacus", "abbot", "about", "no")
    before = allowed(constraint.mask.words)

    def behind(text: str, *, jumps: bool = True) -> list[str]:
        tokens = [4 + ord(letter) for letter in text]
        masks = bench.pool.follow(constraint, tokens, jumps=jumps)
        return [allowed(mask.words) for mask in masks]

    assert behind("abx", jumps=False) == ["b", "abo"]
    assert behind("abou", jumps=False) == ["b", "abo", "u", "t"]
    assert behind("about", jumps=False) == ["b", "abo", "u", "t"]  # it would be complete
    assert behind("xy") == []
    assert behind("ab") == []  # behind a the b is forced
    assert allowed(constraint.mask.words) == before == "an"
    bench.pool.close()


def test_a_request_with_a_grammar_is_aborted_among_its_drafts() -> None:
    bench = Bench()
    world = RecordedWorld(settings(speculative=SOURCES), 0, grammars=Patient(bench))
    world.let_steps_cost(lambda plan: 0.01 + 0.0001 * plan.num_tokens)
    model(world)
    rng = random.Random("aborts")
    for number in range(20):
        world.send([*PROMPT, number], **wish(rng))
        world.step()
        world.abort(Abort(ids=(rng.randrange(number + 1),)))
    world.run_dry()
    world.check_idle()
    bench.pool.close()
    world.replay()

"""Structured output in the scheduler: waiting for grammars, masks, ends, retraction, and the
journal of it all. The grammars are choices, followed by the plain twin; the model is the oracle,
which takes what the mask allows."""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.engine.engine_world import EngineWorld
from tests.grammar.choice import ChoiceCompiler, ChoiceMatcher
from tests.scheduler.grammars import (
    PROMPT,
    VOCABULARY,
    WORDS,
    Bench,
    choice,
    obey_masks,
    until_compiled,
)
from tests.scheduler.grammars import bench as bench
from tests.scheduler.oracle_runner import OracleRunner
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.scenes import settings
from tests.scheduler.timed import timed
from tests.scheduler.world import EOS
from tests.seeds import seeds, slow
from weft.grammar.masks import Words
from weft.grammar.pool import FEW, GrammarPool
from weft.grammar.protocol import Compiled, GrammarMatcher, Key
from weft.grammar.sandbox import NoSandbox
from weft.journal.replay import Replay
from weft.messages.control import (
    BlockInput,
    ContinueGeneration,
    ExplainRequest,
    ListRequests,
    PauseGeneration,
    UnblockInput,
)
from weft.messages.requests import Abort
from weft.messages.sampling import Grammar, ThinkingMarks
from weft.plan.logits import GrammarMask, LogitBias
from weft.plan.step import Plan, Result, find


def make_world(bench: Bench, depth: int = 0, **changes: Any) -> EngineWorld:
    world = EngineWorld(settings(**changes), depth, grammars=bench.pool)
    obey_masks(world.runner)
    return world


def said(world: Any, id: int) -> str:
    return b"".join(VOCABULARY[token] for token in world.outputs[id]).decode()


# Outputs


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    "changes", [{}, {"mixed_chunk": True, "chunked_prefill_size": 16}, {"prefix_cache": False}]
)
def test_every_output_is_one_of_the_choices(
    bench: Bench, depth: int, changes: dict[str, Any]
) -> None:
    world = make_world(bench, depth, **changes)
    ids = [world.send([*PROMPT, i], grammar=choice(), max_new_tokens=60) for i in range(20)]
    free = [world.send([*PROMPT, 50 + i], max_new_tokens=9, ignore_eos=True) for i in range(5)]
    until_compiled(world, bench)
    world.run_dry()
    world.check_idle()
    assert {said(world, id) for id in ids} <= set(WORDS)
    assert len({said(world, id) for id in ids}) > 1
    assert {world.finished[id].reason for id in ids} == {"stop"}
    assert [len(world.outputs[id]) for id in free] == [9] * 5


def test_outputs_do_not_depend_on_retraction_chunks_overlap_or_jumps(bench: Bench) -> None:
    def outputs(bench: Bench, depth: int, **changes: Any) -> list[list[int]]:
        world = make_world(bench, depth, **changes)
        long = choice("no, " + WORDS[3], "not " + WORDS[3])
        ids = [world.send([*PROMPT, i], grammar=long, max_new_tokens=60) for i in range(12)]
        bench.rung.wait(240)
        world.run_dry()
        retractions.append(world.scheduler.counters.num_retractions)
        return [world.outputs[id] for id in ids]

    retractions: list[int] = []
    slow = Bench(jump=False)
    plain = outputs(slow, 0)
    tight = {"num_pages": 110, "schedule_conservativeness": 0.0, "chunked_prefill_size": 16}
    assert outputs(slow, 0, **tight) == plain
    assert outputs(slow, 1, **tight) == plain
    slow.pool.close()
    assert retractions[0] == 0
    assert min(retractions[1:]) > 0
    assert outputs(bench, 0) == plain
    assert outputs(bench, 1, **tight) == plain


def test_requests_that_wait_for_a_compilation_of_another_are_counted(bench: Bench) -> None:
    world = make_world(bench)
    bench.gate.opened.clear()
    for i in range(3):
        world.send([*PROMPT, i], grammar=choice(), max_new_tokens=60)
    bench.gate.opened.set()
    until_compiled(world, bench)
    world.send(PROMPT, grammar=choice(), max_new_tokens=60)  # from the cache
    world.run_dry()
    stats = world.engine.services.stats()
    assert stats.total_grammars == 4
    assert stats.total_grammar_shared == 2
    assert stats.total_grammar_hits == 1


def test_the_end_token_is_allowed_only_at_the_end_and_a_longer_choice_may_go_on(
    bench: Bench,
) -> None:
    world = make_world(bench)
    ids = [
        world.send([*PROMPT, i], grammar=choice("ab", "abcd"), max_new_tokens=60) for i in range(30)
    ]
    until_compiled(world, bench)
    world.run_dry()
    ends = {tuple(world.outputs[id][2:]): world.finished[id].matched for id in ids}
    assert ends == {(EOS,): EOS, (4 + ord("c"), 4 + ord("d")): None}


def test_max_tokens_cuts_with_reason_length_unless_the_grammar_ends_with_that_token(
    bench: Bench,
) -> None:
    world = make_world(bench)
    cut = world.send(PROMPT, grammar=choice("yes"), max_new_tokens=2)
    whole = world.send(PROMPT, grammar=choice("yes"), max_new_tokens=3)
    until_compiled(world, bench)
    world.run_dry()
    assert said(world, cut) == "ye"
    assert world.finished[cut].reason == "length"
    assert said(world, whole) == "yes"
    assert world.finished[whole].reason == "stop"


class Panicking(ChoiceMatcher):
    def fork(self) -> ChoiceMatcher:
        return Panicking(self.vocabulary, self.eos, self.left)

    def consume(self, token: int) -> bool:
        raise ZeroDivisionError


class Breaking(ChoiceCompiler):
    """A library that fails on an exclamation mark."""

    def fill(self, matchers: Any, masks: Words) -> None:
        if any(b"!" in one.left for one in matchers):
            raise ValueError("a bug of the library")
        super().fill(matchers, masks)


def test_a_dead_end_or_an_exception_ends_only_that_request() -> None:
    class DeadEnd(Breaking):
        def compile(self, key: Key) -> Compiled:
            compiled = super().compile(key)
            assert isinstance(compiled.matcher, ChoiceMatcher)
            if "%" in key.text:
                return Compiled(
                    Panicking(VOCABULARY, frozenset({EOS}), compiled.matcher.left), compiled.mask, 1
                )
            if "?" in key.text:
                compiled.matcher.vocabulary = [
                    piece if piece != b"?" else b"" for piece in VOCABULARY
                ]
            return compiled

    bench = Bench(DeadEnd(VOCABULARY, frozenset({EOS})))
    world = make_world(bench)
    texts = ["yes"], ["a?"], ["b!", "b."], ["c%"]
    good, *bad = (world.send(PROMPT, grammar=choice(*some), max_new_tokens=9) for some in texts)
    while len(bench.pool.cache) < len(texts):
        world.step()
    world.run_dry()
    world.check_idle()
    assert said(world, good) == "yes"
    assert world.finished[good].reason == "stop"
    for id in bad:
        assert world.finished[id].reason == "error"
        assert world.finished[id].status == 500
    reasons = [world.finished[id].message.rpartition(": ")[2] for id in bad]
    assert reasons == ["nothing may follow", "nothing may follow", "ZeroDivisionError"]


def test_a_grammar_that_cannot_be_followed_is_a_fault_of_the_request() -> None:
    class TooHard(ChoiceMatcher):
        def fork(self) -> ChoiceMatcher:
            return TooHard(self.vocabulary, self.eos, self.left)

        def consume(self, token: int) -> bool:
            self.error = "too many states: 50,000 are allowed"
            return False

    class Hard(ChoiceCompiler):
        def compile(self, key: Key) -> Compiled:
            compiled = super().compile(key)
            assert isinstance(compiled.matcher, ChoiceMatcher)
            left = compiled.matcher.left
            return Compiled(TooHard(VOCABULARY, frozenset({EOS}), left), compiled.mask, 1)

    bench = Bench(Hard(VOCABULARY, frozenset({EOS})))
    world = make_world(bench)
    id = world.send(PROMPT, grammar=choice("yes"), max_new_tokens=9)
    while not len(bench.pool.cache):
        world.step()
    world.run_dry()
    world.check_idle()
    assert world.finished[id].reason == "error"
    assert world.finished[id].status == 400
    assert "50,000 are allowed" in world.finished[id].message


def test_an_output_that_gets_stuck_while_its_step_runs_is_replayed() -> None:
    bench = Bench(Breaking(VOCABULARY, frozenset({EOS})))
    world = RecordedWorld(settings(), 1, grammars=bench.pool)
    obey_masks(world.runner)
    ids = [
        world.send([*PROMPT, i], grammar=choice("b!", "b.", "no"), max_new_tokens=9)
        for i in range(12)
    ]
    bench.rung.wait(240)
    world.run_dry()
    stuck = [world.finished[id] for id in ids if said(world, id) == "b"]
    assert 0 < len(stuck) < len(ids)
    assert {finish.message for finish in stuck} == {
        "the output cannot go on in its grammar: nothing may follow"
    }
    assert {said(world, id) for id in ids} == {"b", "no"}
    replay = Replay(world.records)
    assert replay.run(), replay.difference


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("number", [FEW - 1, FEW, 20])
def test_masks_are_not_waited_for_before_the_next_step_is_launched(
    depth: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library fills masks only while a step is under way that needs them."""
    launched = threading.Event()
    launched.set()

    class Late(ChoiceCompiler):
        def fill(self, matchers: Sequence[GrammarMatcher], masks: Words) -> None:
            assert launched.wait(240)
            super().fill(matchers, masks)

    bench = Bench(Late(VOCABULARY, frozenset({EOS})))
    world = make_world(
        bench, depth, max_running_requests=20, chunked_prefill_size=1_000, num_pages=1_000
    )
    texts = {f"{a}{b}{c}" for a in "xy" for b in "xy" for c in "xy"}
    ids = [
        world.send([*PROMPT, i], grammar=choice(*sorted(texts)), max_new_tokens=9)
        for i in range(number)
    ]
    until_compiled(world, bench)
    launch = world.runner.launch
    advance = bench.pool.advance

    def advanced(*args: Any) -> Any:
        launched.clear()
        return advance(*args)

    def launching(plan: Plan) -> Any:
        launched.set()
        return launch(plan)

    monkeypatch.setattr(bench.pool, "advance", advanced)
    monkeypatch.setattr(world.runner, "launch", launching)
    world.run_dry()
    launched.set()
    assert {said(world, id) for id in ids} <= texts
    bench.pool.close()


# Reasoning before


BEGIN = 270
END_1 = 271
END_2 = 272


def script(runner: OracleRunner, *tokens: int) -> None:
    """The oracle wants to say this, whatever it is asked; when it is through, an A for ever."""
    execute = runner.execute
    said = iter(tokens)

    def scripted(plan: Plan) -> Result:
        result = execute(plan)
        token = next(said, 4 + ord("A")) if len(result.tokens) else 0
        runner.last[plan.rows[plan.samples]] = token
        return Result(tokens=np.full_like(result.tokens, token))

    runner.execute = scripted  # type: ignore[method-assign]


def behind(*, is_open: bool) -> Grammar:
    marks = ThinkingMarks((BEGIN,), (END_1, END_2), is_open)
    return Grammar("choice", json.dumps(["yes", "no"]), behind=marks)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_is_free_and_the_grammar_holds_from_its_end_on(
    bench: Bench, depth: int, is_open: bool
) -> None:
    thoughts = [5, END_1, 6, END_2, EOS, END_1, END_2]
    world = EngineWorld(settings(), depth, grammars=bench.pool)
    script(world.runner, *([] if is_open else [BEGIN]), *thoughts)
    obey_masks(world.runner)
    id = world.send(PROMPT, grammar=behind(is_open=is_open), max_new_tokens=60, ignore_eos=True)
    until_compiled(world, bench)
    world.run_dry()
    free = len(thoughts) + (not is_open)
    assert world.outputs[id][:free] == [BEGIN] * (not is_open) + thoughts
    assert b"".join(VOCABULARY[token] for token in world.outputs[id][free:]) in (b"yes", b"no")
    assert world.finished[id].reason == "stop"
    assert not world.engine.services.grammars.feature._thinking


@pytest.mark.parametrize("ignores", [False, True])
def test_the_output_may_not_end_while_it_reasons(bench: Bench, ignores: bool) -> None:
    world = EngineWorld(settings(), grammars=bench.pool)
    seen = []
    execute = world.runner.execute

    def watching(plan: Plan) -> Result:
        if plan.samples.any():
            has_mask = find(plan.logits, GrammarMask) is not None
            seen.append((find(plan.logits, LogitBias), has_mask))
        return execute(plan)

    world.runner.execute = watching  # type: ignore[method-assign]
    script(world.runner, 5, END_1, END_2)
    obey_masks(world.runner)
    world.send(PROMPT, grammar=behind(is_open=True), max_new_tokens=60, ignore_eos=ignores)
    until_compiled(world, bench)
    world.run_dry()
    forbidden = [bias for bias, has_mask in seen if bias is not None and not has_mask]
    assert [bias.tokens.tolist() for bias in forbidden] == ([] if ignores else [[EOS]] * 3)
    assert all((bias.values == -np.inf).all() for bias in forbidden)
    assert all(bias is None for bias, has_mask in seen if has_mask)


def test_outputs_without_reasoning_obey_from_the_first_token_on(bench: Bench) -> None:
    world = EngineWorld(settings(), grammars=bench.pool)
    script(world.runner, BEGIN + 5, BEGIN, END_1, END_2)
    obey_masks(world.runner)
    id = world.send(PROMPT, grammar=behind(is_open=False), max_new_tokens=60)
    until_compiled(world, bench)
    world.run_dry()
    assert said(world, id) in ("yes", "no")


def test_reasoning_before_a_grammar_survives_retraction_and_is_replayed(bench: Bench) -> None:
    world = RecordedWorld(
        settings(num_pages=120, schedule_conservativeness=0.0), 1, grammars=bench.pool
    )
    obey_masks(world.runner)
    marks = ThinkingMarks((BEGIN,), (4 + ord("e"),), is_open=True)
    texts = ["ready or not, here it is", "ruled out"]
    grammar = Grammar("choice", json.dumps(texts), behind=marks)
    ids = [
        world.send([*PROMPT, i], grammar=grammar, max_new_tokens=85, ignore_eos=True)
        for i in range(20)
    ]
    bench.rung.wait(240)
    world.run_dry()
    assert world.scheduler.counters.num_retractions
    ended = [id for id in ids if world.finished[id].reason == "stop"]
    assert len(ended) > 3
    for id in ended:
        place = world.outputs[id].index(4 + ord("e")) + 1
        assert b"".join(VOCABULARY[token] for token in world.outputs[id][place:]).decode() in texts
    replay = Replay(world.records)
    assert replay.run(), replay.difference


# Waiting


def test_while_a_grammar_compiles_others_run_and_the_engine_sleeps_until_it_is_rung(
    bench: Bench,
) -> None:
    bench.gate.opened.clear()
    world = make_world(bench)
    waits = world.send(PROMPT, grammar=choice(), max_new_tokens=60)
    runs = world.send(PROMPT, max_new_tokens=3, ignore_eos=True)
    for _ in range(6):
        world.step()
    assert world.finished[runs].reason == "length"
    assert waits not in world.finished
    assert world.engine.wait_s == math.inf  # nothing is asked again and again
    reply: Any = world.tell(ListRequests(call=1))
    assert reply.queue.grammar_queue_size == 1
    [row] = reply.requests
    assert row.state == "grammar"
    assert row.why == "its grammar is being compiled"
    reply = world.tell(ExplainRequest(call=2, rid=f"r{waits}"))
    (found,) = reply.found
    assert found.state == row.state
    assert found.why == row.why
    assert found.row is None
    assert found.grammar == choice().name
    assert "held: its grammar is being compiled" in [entry.what for entry in found.timeline]
    bench.gate.opened.set()
    until_compiled(world, bench)
    world.run_dry()
    assert said(world, waits) in WORDS
    told: Any = world.tell(ExplainRequest(call=2, rid=f"r{waits}"))
    story = [entry.what for entry in told.found[0].timeline]
    assert f"grammar: {choice().name}, 70 characters: it is being compiled" in story
    assert any(what.startswith("grammar: ready after") for what in story), story


def test_a_request_that_is_aborted_while_its_grammar_compiles_holds_nothing(bench: Bench) -> None:
    bench.gate.opened.clear()
    world = make_world(bench)
    gone, stays = (world.send(PROMPT, grammar=choice(), max_new_tokens=60) for _ in range(2))
    world.step()
    world.abort(Abort(ids=(gone,)))
    world.step()
    assert world.finished[gone].reason == "abort"
    bench.gate.opened.set()
    until_compiled(world, bench)
    world.run_dry()
    assert said(world, stays) in WORDS
    world.check_idle()
    assert not world.engine.services.grammars.feature.queue


def test_an_invalid_grammar_answers_400_with_the_reason(bench: Bench) -> None:
    world = make_world(bench)
    bad = world.send(PROMPT, grammar=Grammar("regex", "a+"), max_new_tokens=9)
    until_compiled(world, bench)
    again = world.send(PROMPT, grammar=Grammar("regex", "a+"), max_new_tokens=9)
    world.run_dry()
    for id in (bad, again):
        finish = world.finished[id]
        assert finish.reason == "error"
        assert finish.status == 400
        assert finish.message == "the grammar is invalid: only choices are compiled here, not regex"
    assert bench.pool.num_compiled == 1  # what is invalid is remembered


def test_without_a_grammar_service_such_requests_are_refused() -> None:
    world = EngineWorld(settings())
    id = world.send(PROMPT, grammar=choice(), max_new_tokens=9)
    world.run_dry()
    assert world.finished[id].status == 400
    assert world.finished[id].message == "this engine compiles no grammars"


@pytest.mark.parametrize("seed", seeds(2, 3))
def test_at_random_every_request_gets_one_final_word_and_nothing_is_left(
    bench: Bench, seed: int
) -> None:
    rng = random.Random(seed)
    world = make_world(
        bench, seed % 3, num_pages=120, schedule_conservativeness=0.0, chunked_prefill_size=16
    )
    grammars = [
        choice(),
        choice("a", "ab"),
        choice(*(f"{i} and {'so on ' * i}" for i in range(8))),
        None,
    ]
    grammars.append(Grammar("regex", "a+"))
    for _ in range(60):
        prompt = [rng.randrange(300) for _ in range(rng.randrange(1, 40))]
        world.send(prompt, grammar=rng.choice(grammars), max_new_tokens=rng.randrange(20, 60))
        if rng.random() < 0.4:
            world.step()
        if rng.random() < 0.2:
            world.abort(Abort(ids=(rng.randrange(len(world.sent)),)))
    while world.engine.services.grammars.feature.queue:
        world.step()
    world.run_dry()
    world.check_idle()
    assert not world.engine.services.grammars.feature._constraints
    for id, request in world.sent.items():
        grammar = request.sampling.grammar
        if grammar is not None and grammar.kind == "choice" and world.finished[id].reason == "stop":
            assert said(world, id) in json.loads(grammar.text)
    stats = world.engine.services.stats()
    assert stats.num_grammar_queue == 0
    assert stats.total_grammars == sum(1 for one in world.sent.values() if one.sampling.grammar)
    assert stats.total_grammar_refused > 0


def test_the_time_until_a_grammar_is_compiled_is_part_of_the_expected_time(bench: Bench) -> None:
    world = EngineWorld(settings(max_slowdown=2.5, prefix_cache=False), grammars=bench.pool)
    timed(world)
    obey_masks(world.runner)

    def ask(grammar: Grammar, **options: Any) -> int:
        bench.gate.opened.clear()
        bench.rung.clear()
        return world.send(PROMPT, grammar=grammar, max_new_tokens=60, **options)

    def expected(id: int) -> Any:
        reply: Any = world.tell(ExplainRequest(call=1, rid=f"r{id}"))
        return reply.found[0].first_token_in_s

    def compiled() -> None:
        bench.gate.opened.set()
        while world.engine.services.grammars.feature.queue:
            assert bench.rung.wait(240)  # the end of a request that was refused rings, too
            bench.rung.clear()
            world.step()
        world.run_dry(check=False)

    first = ask(choice("a", "b"))
    assert expected(first) is None  # no grammar was compiled yet: nobody knows
    world.time += 2.0
    compiled()
    second = ask(choice("c", "d"))
    own_s = expected(second)[1] - 2.0
    assert 0.0 < own_s < 0.2
    world.time += 1.5
    assert expected(second)[1] == pytest.approx(0.5 + own_s)
    world.time += 2.5
    assert expected(second)[1] == pytest.approx(4.0 + own_s)  # longer than any: as long again
    late = world.send(PROMPT, grammar=choice("e"), max_new_tokens=9, ttft_ms=1_000)
    world.step(check=False)
    assert world.finished[late].status == 503
    compiled()
    cached = world.send(PROMPT, grammar=choice("a", "b"), max_new_tokens=60, ttft_ms=1_000)
    world.run_dry(check=False)
    assert world.finished[cached].status == 200
    assert not world.engine.services.grammars.feature.queue


def test_a_paused_engine_and_a_blocked_input_expect_no_time(bench: Bench) -> None:
    world = EngineWorld(settings(max_slowdown=2.5, prefix_cache=False))
    timed(world)
    for begins, ends in (
        (PauseGeneration(call=1, mode="in_place"), ContinueGeneration(call=2)),
        (BlockInput(call=1), UnblockInput(call=2)),
    ):
        world.tell(begins)
        id = world.send(PROMPT, max_new_tokens=3)
        for message, is_known in ((None, False), (ends, True)):
            if message is not None:
                world.tell(message)
            reply: Any = world.tell(ExplainRequest(call=3, rid=f"r{id}"))
            assert (reply.found[0].first_token_in_s is not None) is is_known
        world.run_dry(check=False)


# The journal


@pytest.mark.parametrize("puts_aside", [False, True])
@pytest.mark.parametrize("depth", [1, *slow([0])])
def test_a_journal_with_grammars_replays_without_them(
    bench: Bench, depth: int, puts_aside: bool
) -> None:
    world = RecordedWorld(
        settings(num_pages=120, schedule_conservativeness=0.0), depth, grammars=bench.pool
    )
    if puts_aside:
        world.put_aside_often()
    obey_masks(world.runner)
    for i in range(14):
        world.send(
            [*PROMPT, i], grammar=choice() if i % 3 else None, max_new_tokens=60, ignore_eos=False
        )
        world.step()
    world.send(PROMPT, grammar=Grammar("regex", "a+"), max_new_tokens=9)
    while len(bench.pool.cache) < 2:
        world.step()
    world.abort(Abort(ids=(5,)))
    world.run_dry()
    assert world.scheduler.counters.num_retractions
    world.replay(check=True)


# The service


def service(bench: Bench, take: Callable[[], list[Any]], number: int) -> list[Any]:
    verdicts: list[Any] = []
    while len(verdicts) < number:
        assert bench.rung.wait(240)
        verdicts += take()
    return verdicts


def test_one_grammar_is_compiled_once_however_many_ask(bench: Bench) -> None:
    bench.gate.opened.clear()
    key = Key("choice", '["a"]')
    for number in range(20):
        bench.pool.ask(number, key)
    assert bench.pool.take() == []
    bench.gate.opened.set()
    verdicts = service(bench, bench.pool.take, 20)
    assert bench.pool.num_compiled == 1
    assert sorted(verdict.id for verdict in verdicts) == list(range(20))
    matchers: list[GrammarMatcher] = [verdict.constraint.matcher for verdict in verdicts]
    assert len({id(matcher) for matcher in matchers}) == 20
    bench.pool.ask(99, key)
    assert [verdict.id for verdict in bench.pool.take()] == [99]  # from the cache, at once


def test_a_failure_that_is_not_the_grammars_is_not_remembered(bench: Bench) -> None:
    from weft.grammar.sandbox import SandboxFailed

    key = Key("choice", '["a"]')
    bench.gate.fails = SandboxFailed("too slow")
    bench.pool.ask(1, key)
    [verdict] = service(bench, bench.pool.take, 1)
    assert verdict.constraint is None
    assert verdict.status == 400
    assert verdict.message == "too slow"
    bench.gate.fails = None
    bench.pool.ask(2, key)
    [verdict] = service(bench, bench.pool.take, 1)
    assert verdict.constraint is not None


def test_what_nobody_waits_for_and_has_not_begun_is_not_compiled(bench: Bench) -> None:
    bench.gate.opened.clear()
    for id in range(10):
        bench.pool.ask(id, Key("choice", json.dumps([f"{id}"])))
    for id in range(10):
        bench.pool.cancel(id)
    bench.pool.ask(10, Key("choice", '["x"]'))
    bench.gate.opened.set()
    assert [verdict.id for verdict in service(bench, bench.pool.take, 1)] == [10]
    assert bench.pool.num_compiled <= 3  # two had begun


def test_the_cache_is_bounded_in_bytes_and_drops_the_least_recently_used() -> None:
    bench = Bench()
    bench.pool = GrammarPool(
        lambda: bench.compiler, max_bytes=20_000, make_sandbox=NoSandbox, notify=bench.rung.set
    )
    for id in range(60):
        bench.pool.ask(id, Key("choice", json.dumps([f"{id}" + "x" * 300])))
        service(bench, bench.pool.take, 1)
        bench.pool.ask(1_000 + id, Key("choice", json.dumps(["0" + "x" * 300])))
        assert len(bench.pool.take()) == 1, "the one in use was dropped"
    assert bench.pool.cache.num_bytes <= 20_000
    assert 5 < len(bench.pool.cache) < 40
    assert bench.pool.num_compiled == 60

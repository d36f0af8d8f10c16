"""Tokens are guessed, rightly and wrongly: no output changes, and nothing of a wrong guess
stays."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from tests.scheduler.oracle_runner import expected_output
from tests.scheduler.random_worlds import run_random
from tests.scheduler.scenes import settings
from tests.scheduler.world import EOS, VOCAB, World
from tests.seeds import one_in, seeds
from weft.engine.explain import explain
from weft.memory.prefix_cache import CacheKey
from weft.memory.radix.cache import RadixCache
from weft.messages.requests import Abort, GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.messages.status import Stats
from weft.plan.logits import Penalties
from weft.plan.step import LAST_SAMPLED, Plan, Result, find
from weft.scheduler.features.penalties import PenaltiesFeature
from weft.scheduler.request import Request
from weft.scheduler.speculation import speculator
from weft.scheduler.speculation.planner import SpeculativePlanner
from weft.scheduler.speculation.sources import (
    ExpectedText,
    Known,
    PrefixTree,
    Repetition,
    make_sources,
)
from weft.scheduler.speculation.speculator import MAX_LOOKS, NO_IDEA, NOT_PLAIN, NOT_WORTH_IT
from weft.scheduler.speculation.trust import HitRate, num_worthwhile


def drafting(sources: str = "prediction,tree,ngram", **changes: object) -> World:
    """A world in which another token of a step costs little."""
    world = World(settings(speculative=sources, **changes))
    world.let_steps_cost(lambda plan: 0.01 + 0.0001 * plan.num_tokens)
    return world


def warmed(world: World) -> World:
    """It has seen what steps cost."""
    world.send([9, 8, 7], max_new_tokens=3, ignore_eos=True)
    world.run_dry()
    return world


def noted_plans(world: World) -> list[Plan]:
    """The plans that are launched from now on."""
    plans: list[Plan] = []
    launch = world.runner.launch

    def noted(plan: Plan) -> object:
        plans.append(plan)
        return launch(plan)

    world.runner.launch = noted  # type: ignore[method-assign, assignment]
    return plans


def num_steps(
    world: World, prompt: Sequence[int], expects: Sequence[int], **sampling: object
) -> int:
    """The steps that a request takes, whose output is as it must be."""
    before = world.num_steps
    id = world.send(list(prompt), prediction=list(expects), **sampling)
    world.run_dry()
    length = int(str(sampling["max_new_tokens"]))
    assert world.outputs[id] == expected_output(list(prompt), length, VOCAB, set())
    return world.num_steps - before


def totals(world: World) -> tuple[int, int]:
    """Drafts, and right ones."""
    stats: Stats = world.scheduler.stats()
    drafts = stats.total_drafts_prediction + stats.total_drafts_tree + stats.total_drafts_ngram
    right = stats.total_accepted_prediction + stats.total_accepted_tree + stats.total_accepted_ngram
    return drafts, right


# ---- whole runs


@pytest.mark.parametrize("seed", seeds(3, 16))
def test_random_schedules_with_drafts_give_the_same_outputs(seed: int) -> None:
    run_random(seed, drafts=True)


@pytest.mark.parametrize("seed", one_in(4, range(100, 108)))
def test_random_schedules_with_drafts_and_windows_give_the_same_outputs(seed: int) -> None:
    run_random(seed, drafts=True, windows=True)


def test_a_right_prediction_takes_a_fraction_of_the_steps() -> None:
    world = warmed(drafting())
    prompt = [1, 2, 3, 4, 5]
    expects = expected_output(prompt, 30, VOCAB, set())
    assert num_steps(world, prompt, expects, max_new_tokens=30, ignore_eos=True) < 12
    drafts, right = totals(world)
    assert drafts == right > 20


def test_a_wrong_prediction_is_given_up() -> None:
    world = warmed(drafting())
    prompt = [1, 2, 3, 4, 5]
    output = expected_output(prompt, 60, VOCAB, set())
    # Behind two right ones a token is wrong, so that the place is found again and again.
    expects = [(token + (i % 3 == 2)) % VOCAB for i, token in enumerate(output)]
    assert num_steps(world, prompt, expects, max_new_tokens=60, ignore_eos=True) <= 62
    drafts, right = totals(world)
    assert right < drafts < 60  # a draft costs a hundredth of a step here


def test_a_token_is_listed_by_its_id_only_behind_drafts() -> None:
    world = warmed(drafting("prediction"))
    plans: list[Plan] = []
    execute = world.runner.execute

    def noted(plan: Plan) -> Result:
        plans.append(plan)
        return execute(plan)

    world.runner.execute = noted  # type: ignore[method-assign]
    prompt = [1, 2, 3, 4, 5]
    output = expected_output(prompt, 20, VOCAB, set())
    expects = [*output[:3], (output[3] + 1) % VOCAB]
    num_steps(world, prompt, expects, max_new_tokens=20, ignore_eos=True)
    decodes = plans[1:]
    drafted = [len(plan.tokens) > 1 for plan in decodes]
    assert any(drafted)
    for plan, was_drafted in zip(decodes[1:], drafted, strict=False):
        assert (plan.tokens[0] == LAST_SAMPLED) != was_drafted
    world.check_outputs()


def test_a_request_that_is_sent_again_follows_the_first() -> None:
    world = warmed(drafting("tree"))
    prompt = [5, 4, 3, 2, 1, 0]
    first = num_steps(world, prompt, [], max_new_tokens=40, ignore_eos=True)
    assert num_steps(world, prompt, [], max_new_tokens=40, ignore_eos=True) < first / 3


def test_nothing_is_remembered_of_requests_that_have_ended() -> None:
    world = warmed(drafting("tree"))
    for first in range(8):
        world.send([first, 4, 3], max_new_tokens=20, ignore_eos=True)
    for _ in range(5):
        world.step()
    assert isinstance(world.scheduler.planner, SpeculativePlanner)
    speculator = world.scheduler.planner._speculator
    [tree] = speculator.sources
    assert isinstance(tree, PrefixTree)
    assert tree._not_before
    world.run_dry()
    assert not tree._not_before
    assert not speculator._rows


def test_the_finish_says_what_became_of_a_prediction() -> None:
    world = warmed(drafting())
    prompt = [1, 2, 3, 4, 5]
    expects = expected_output(prompt, 20, VOCAB, set())
    expects[12] = (expects[12] + 1) % VOCAB
    id = world.send(prompt, prediction=expects, max_new_tokens=20, ignore_eos=True)
    world.run_dry()
    finish = world.finished[id]
    assert finish.accepted_prediction_tokens > 8
    assert finish.rejected_prediction_tokens > 0
    plain = world.send(prompt, max_new_tokens=20, ignore_eos=True)
    world.run_dry()
    assert world.finished[plain].accepted_prediction_tokens == 0


def test_nothing_is_guessed_before_costs_are_known_nor_where_it_is_off() -> None:
    prompt = [1, 2, 3, 4, 5]
    expects = expected_output(prompt, 20, VOCAB, set())
    unknown = World(settings(speculative="prediction"))  # its clock says that steps take no time
    off = drafting("off")
    for world in (unknown, off):
        assert num_steps(world, prompt, expects, max_new_tokens=20, ignore_eos=True) >= 20
        assert totals(world) == (0, 0)


def test_a_stop_token_inside_of_a_run_ends_it() -> None:
    world = warmed(drafting())
    prompt = [1, 2, 3, 4, 5]
    expects = expected_output(prompt, 30, VOCAB, set())
    stop = expects[9]
    id = world.send(
        prompt, prediction=expects, max_new_tokens=30, ignore_eos=True, stop_token_ids=(stop,)
    )
    world.run_dry()
    assert world.outputs[id] == expects[: expects.index(stop) + 1]
    assert (world.finished[id].reason, world.finished[id].matched) == ("stop", stop)


@pytest.mark.parametrize("poison", [7, 23])
def test_a_token_that_is_not_finite_inside_of_a_run_ends_its_request_alone(poison: int) -> None:
    def outputs(sources: str) -> list[tuple[list[int], str]]:
        world = warmed(drafting(sources))
        world.runner.poison = poison
        for first in range(12):
            prompt = [first, 2, 3]
            expects = expected_output(prompt, 25, VOCAB, {EOS})
            world.send(prompt, prediction=expects, max_new_tokens=25)
        world.run_dry()
        return [(world.outputs[id], world.finished[id].reason) for id in range(1, 13)]

    assert outputs("prediction") == outputs("off")


def test_drafts_take_no_memory_that_a_step_needs() -> None:
    """The pool has room for the two requests and nothing else: none is retracted for a guess."""
    world = warmed(drafting("prediction", num_pages=52, page_size=1, prefix_cache=False))
    for first in (1, 2):
        prompt = [first, 2, 3, 4, 5]
        expects = expected_output(prompt, 20, VOCAB, set())
        world.send(prompt, prediction=expects, max_new_tokens=20, ignore_eos=True)
    world.run_dry()
    assert world.scheduler.stats().total_retractions == 0
    assert totals(world)[1] > 10


def overlapping(num_wrong: int = 0, **sampling: object) -> tuple[World, list[Plan]]:
    """A request with overlap, whose prediction is wrong at so many places. Returns the plans that
    were launched behind a step with drafts whose result nobody had seen."""
    world = World(settings(speculative="prediction"), depth=1)
    world.let_steps_cost(lambda plan: 0.01 + 0.0001 * plan.num_tokens)
    behind: list[Plan] = []
    launch = world.runner.launch

    def noted(plan: Plan) -> object:
        pending = world.runner.pending
        if pending and pending[-1].plan.drafts is not None:
            behind.append(plan)
        return launch(plan)

    world.runner.launch = noted  # type: ignore[method-assign, assignment]
    warmed(world)
    prompt = [1, 2, 3, 4, 5]
    answer = expected_output(prompt, 90, VOCAB, set())
    expects = list(answer)
    for i in range(num_wrong):
        expects[20 * (i + 1)] ^= 1
    before = world.num_steps
    id = world.send(prompt, prediction=expects, max_new_tokens=90, ignore_eos=True, **sampling)
    world.run_dry()
    assert world.outputs[id] == answer
    world.num_steps -= before
    return world, behind


@pytest.mark.parametrize("num_wrong", [0, 1, 3])
def test_with_overlap_steps_are_planned_behind_drafts_that_are_not_compared(num_wrong: int) -> None:
    world, behind = overlapping(num_wrong)
    assert any(plan.unsettled is not None and plan.drafts.any() for plan in behind)
    assert world.num_steps < 45
    drafts, right = totals(world)
    assert right > 60
    assert (drafts == right) == (num_wrong == 0)


@pytest.mark.parametrize("seed", seeds(2, 6))
def test_with_overlap_nothing_of_a_wrong_guess_counts_whatever_is_guessed(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predictions nine tenths of which are right, all of them computed, with stop tokens, aborts,
    chunks and retractions."""
    monkeypatch.setattr(speculator, "least_chance", lambda *_: 0.01)
    rng = random.Random(f"overlap {seed}")
    world = World(
        settings(
            speculative="prediction,tree,ngram",
            num_pages=rng.choice([66, 300]),
            page_size=rng.choice([1, 2, 4]),
            max_running_requests=rng.choice([1, 3, 8]),
            context_length=60,
            chunked_prefill_size=rng.choice([-1, 16]),
            max_draft=rng.choice([1, 2, 5, 8]),
        ),
        depth=1,
    )
    world.let_steps_cost(lambda plan: 0.01 + 0.0001 * plan.num_tokens)
    prompt = [5]
    for i in range(25):
        if i % 4:
            prompt = [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 20))]
        length = rng.choice([5, 20, 35])
        answer = expected_output(prompt, length, VOCAB, {EOS})
        guess = [token if rng.random() < 0.9 else rng.randrange(VOCAB) for token in answer]
        stops = (rng.choice(answer),) if rng.random() < 0.2 else ()
        world.send(prompt, prediction=guess, max_new_tokens=length, stop_token_ids=stops)
        for _ in range(rng.randint(0, 6)):
            if world.has_work:
                world.step()
        if rng.random() < 0.1:
            world.abort(Abort(ids=(rng.randrange(len(world.sent)),)))
    world.run_dry()
    world.check_idle()
    world.check_outputs()
    assert world.runner.num_unsettled > 10


def test_with_overlap_a_guess_behind_a_wrong_one_is_compared_with_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every other guess is wrong, and the one behind it is what is sampled in its place."""
    monkeypatch.setattr(speculator, "least_chance", lambda *_: 0.01)
    prompt = [1, 2, 3, 4, 5]
    answer = expected_output(prompt, 40, VOCAB, set())
    looks: list[int] = []

    def drafts(source: ExpectedText, known: Known, num_tokens: int) -> bytes:
        place = len(unpacked(known.output))
        looks.append(place)
        is_wrong = len(looks) % 2
        guess = answer[0] ^ 1 if is_wrong else answer[place + 1]
        return packed([guess] * num_tokens)

    monkeypatch.setattr(ExpectedText, "drafts", drafts)
    world = warmed(World(settings(speculative="prediction"), depth=1))
    id = world.send(prompt, prediction=[3], max_new_tokens=40, ignore_eos=True)
    world.run_dry()
    assert world.outputs[id] == answer
    assert world.runner.num_unsettled > 5


@pytest.mark.parametrize(("least", "guesses"), [(0.3, True), (0.5, False)])
def test_with_overlap_a_guess_must_be_worth_twice_its_cost(
    least: float, guesses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculator, "least_chance", lambda *_: least)
    monkeypatch.setattr(ExpectedText, "prior", 0.8)
    world = warmed(World(settings(speculative="prediction"), depth=1))
    prompt = [1, 2, 3, 4, 5]
    expects = expected_output(prompt, 20, VOCAB, set())
    world.send(prompt, prediction=expects, max_new_tokens=20, ignore_eos=True)
    world.run_dry()
    assert (totals(world)[0] > 0) == guesses


def test_with_overlap_nothing_is_guessed_for_what_needs_more_than_tokens() -> None:
    prompt = [1, 2, 3, 4, 5]
    expects = expected_output(prompt, 30, VOCAB, set())
    world = World(settings(speculative="prediction"), depth=1, features=(PenaltiesFeature(),))
    warmed(world)
    id = world.send(
        prompt, prediction=expects, max_new_tokens=30, ignore_eos=True, frequency_penalty=0.5
    )
    for _ in range(8):
        world.step()
    assert NOT_PLAIN in drafts_of(world, id)
    world.run_dry()
    assert totals(world) == (0, 0)


@pytest.mark.parametrize("wrong_every", [3, 7, 100])
def test_penalties_see_the_guesses_before_a_token(wrong_every: int) -> None:
    world = World(settings(speculative="prediction"), features=(PenaltiesFeature(),))
    world.let_steps_cost(lambda plan: 0.01 + 0.0001 * plan.num_tokens)
    warmed(world)
    plans = noted_plans(world)
    prompt = [1, 2, 3, 4, 5]
    expects = expected_output(prompt, 40, VOCAB, set())
    for place in range(wrong_every - 1, len(expects), wrong_every):
        expects[place] = (expects[place] + 1) % VOCAB
    id = world.send(
        prompt, prediction=expects, max_new_tokens=40, ignore_eos=True, presence_penalty=0.5
    )
    world.run_dry()
    text = [*prompt, *world.outputs[id]]
    num_guessed = 0
    for plan in plans:
        penalties = find(plan.logits, Penalties)
        assert penalties is not None
        assert not penalties.lacks_last.any()
        num_drafts = 0 if plan.drafts is None else int(plan.drafts[0])
        num_guessed += num_drafts
        start = int(plan.starts[0])
        seen = text[:start]
        for token in plan.tokens.tolist():
            seen.append(text[len(seen)] if token == LAST_SAMPLED else token)
        offsets = penalties.offsets.tolist()
        histories = [penalties.history[begin:end].tolist() for begin, end in pairwise(offsets)]
        first = len(seen) - num_drafts
        assert histories == [seen[:end] for end in range(first, len(seen) + 1)]
    assert num_guessed > 0


@pytest.mark.parametrize("max_tokens", [24, 10])
def test_beside_prompts_drafts_take_what_is_left_of_the_step(max_tokens: int) -> None:
    world = warmed(
        drafting(
            "prediction", chunked_prefill_size=max_tokens, max_prefill_tokens=24, mixed_chunk=True
        )
    )
    plans = noted_plans(world)
    prompt = [1, 2, 3, 4, 5]
    expects = expected_output(prompt, 60, VOCAB, set())
    world.send(prompt, prediction=expects, max_new_tokens=60, ignore_eos=True)
    world.step()
    for first in range(40):
        world.send([first + 9, 8], max_new_tokens=1, ignore_eos=True)
        world.step()
    world.run_dry()
    world.check_outputs()
    beside = [
        plan
        for plan in plans
        if plan.drafts is not None and plan.drafts[-1] and plan.starts[0] == 0
    ]
    assert len(beside) > 3
    assert max(plan.num_tokens for plan in beside) <= max_tokens
    assert all(not plan.drafts[:-1].any() for plan in beside if plan.drafts is not None)


@pytest.mark.parametrize("num_requests", [MAX_LOOKS, MAX_LOOKS + 1])
def test_of_many_requests_a_few_are_looked_at_in_a_step_and_all_in_turn(
    num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def drafts(self: ExpectedText, known: Known, num_tokens: int) -> bytes:
        looks.append(known.request.id)
        return b""

    world = warmed(drafting("prediction", max_running_requests=num_requests))
    monkeypatch.setattr(ExpectedText, "drafts", drafts)
    ids: set[int] = set()
    for i in range(num_requests):
        ids.add(world.send([1, 2, i], prediction=[3], max_new_tokens=40, ignore_eos=True))
    for _ in range(60):
        before = len(looks)
        world.step()
        assert len(looks) - before <= MAX_LOOKS
    assert set(looks) == ids


def test_requests_whose_guesses_are_right_are_looked_at_in_every_step() -> None:
    world = warmed(drafting("prediction", max_running_requests=3 * MAX_LOOKS))
    for i in range(3 * MAX_LOOKS):
        prompt = [1, 2, 3, i]
        expects = expected_output(prompt, 60, VOCAB, set())
        world.send(prompt, prediction=expects, max_new_tokens=60, ignore_eos=True)
    world.run_dry()
    drafts, right = totals(world)
    assert drafts == right > 30 * 3 * MAX_LOOKS


@pytest.mark.parametrize(("step_s", "steps_between"), [(0.01, [1, 1, 1]), (0.0009, [5, 9, 17])])
def test_where_steps_are_short_looks_in_vain_take_a_smaller_and_smaller_part_of_them(
    monkeypatch: pytest.MonkeyPatch, step_s: float, steps_between: list[int]
) -> None:
    looked: list[int] = []

    def drafts(source: ExpectedText, known: Known, num_tokens: int) -> bytes:
        looked.append(world.num_steps)
        return b""

    world = World(settings(speculative="prediction"))
    world.let_steps_cost(lambda plan: step_s + 0.01 * step_s * plan.num_tokens)
    warmed(world)
    monkeypatch.setattr(ExpectedText, "drafts", drafts)
    world.send([1, 2, 3], prediction=[3], max_new_tokens=60, ignore_eos=True)
    world.run_dry()
    between = np.diff(looked).tolist()
    assert between[:3] == steps_between
    assert set(between[3:]) == {steps_between[-1]}


def drafts_of(world: World, id: int) -> str:
    """What is said of the guesses of a request."""
    found = explain(world.scheduler, id, world.time)
    assert found is not None
    return found.drafts


def test_it_is_said_what_became_of_guesses_and_why_there_are_none() -> None:
    prompt = [1, 2, 3, 4, 5]
    expects = expected_output(prompt, 30, VOCAB, set())
    off = drafting("off")
    id = off.send(prompt, max_new_tokens=2, ignore_eos=True)
    assert drafts_of(off, id) == "nothing is guessed (--speculative)"

    world = warmed(drafting("prediction"))
    right = world.send(prompt, prediction=expects, max_new_tokens=30, ignore_eos=True)
    blind = world.send([8, 8, 9], max_new_tokens=40, ignore_eos=True)
    for _ in range(12):
        world.step()
    num = world.scheduler.counters.drafts["prediction"].num_drafts
    assert f"prediction: {num} of {num} guesses were right" in drafts_of(world, right)
    none = "nothing was guessed; none for the last step"
    assert drafts_of(world, blind) == f"{none}: {NO_IDEA}"
    world.run_dry()
    stats = world.scheduler.stats()
    assert 1 < stats.total_accepted_prediction / stats.total_draft_runs <= 8

    wrong = [(token + 1) % VOCAB for token in expects]
    wrong[0] = expects[0]
    costly = warmed(drafting("prediction"))
    costly.let_steps_cost(lambda plan: 0.1 * plan.num_tokens)
    for first in range(12):
        costly.send([first, 3], prediction=wrong, max_new_tokens=30, ignore_eos=True)
    for _ in range(20):
        costly.step()
    assert NOT_WORTH_IT in drafts_of(costly, 2)


# ---- sources


def packed(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


def unpacked(tokens: bytes) -> list[int]:
    return np.frombuffer(tokens, dtype=np.int32).tolist()


def known(prompt: Sequence[int], output: Sequence[int], expects: Sequence[int] = ()) -> Known:
    message = GenerateRequest(
        id=1,
        rid="r",
        input_ids=packed(prompt),
        sampling=SamplingParams(),
        prediction=packed(expects),
    )
    request = Request(message, max_len=100, seed=0, arrival_order=0, arrival_s=0.0)
    return Known(request, packed([*prompt, *output]))


def test_what_is_expected_follows_from_the_start_on_and_again_behind_a_difference() -> None:
    source = ExpectedText()
    expects = list(range(10, 30))
    assert unpacked(source.drafts(known([1, 2], [10], expects), 3)) == [11, 12, 13]
    assert unpacked(source.drafts(known([1, 2], [10, 11, 12, 13, 14], expects), 2)) == [15, 16]
    assert source.drafts(known([1, 2], [99], expects), 3) == b""
    assert unpacked(source.drafts(known([1, 2], [10, 99, 15, 16], expects), 3)) == [17, 18, 19]
    assert source.drafts(known([1, 2], expects, expects), 3) == b""
    assert source.drafts(known([1, 2], [10]), 3) == b""


def test_repetition_takes_the_longest_and_latest_match() -> None:
    source = Repetition(0.5, 4, 2)
    assert unpacked(source.drafts(known([1, 2, 3, 7, 1, 2, 3, 8], [1, 2, 3]), 2)) == [8, 1]
    assert unpacked(source.drafts(known([5, 1, 2, 7, 6, 1, 2, 8], [5, 1, 2]), 1)) == [7]
    assert source.drafts(known([1, 2, 3, 4], [5]), 3) == b""
    # A match of bytes that does not begin where a token does is none.
    odd = known([0x01000000, 0x02000001, 5], [0x00000100])
    assert source.drafts(odd, 3) == b""


@pytest.mark.parametrize(("ngram_max", "guess"), [(4, 9), (3, 7), (1, 6)])
def test_pieces_of_the_text_are_searched_up_to_the_longest_length(
    ngram_max: int, guess: int
) -> None:
    seen = known([0, 1, 2, 3, 9, 4, 1, 2, 3, 7, 5, 3, 6], [0, 1, 2, 3])
    sources = make_sources(("ngram",), RadixCache(1), ngram_max, 1)
    first, *_ = filter(None, (source.drafts(seen, 1) for source in sources))
    assert unpacked(first) == [guess]


def test_a_text_that_goes_in_a_circle_is_guessed_as_far_as_is_asked_for() -> None:
    source = Repetition(0.5, 4, 2)
    assert unpacked(source.drafts(known([9, 5], [5, 5]), 4)) == [5, 5, 5, 5]
    circle = known([9, 1, 2, 3], [1, 2, 3, 1, 2])
    assert unpacked(source.drafts(circle, 7)) == [3, 1, 2, 3, 1, 2, 3]


def test_repetition_of_vectors_looks_at_the_output_alone() -> None:
    source = Repetition(0.5, 4, 2)
    seen = known([1, 2, 3], [1, 2])
    assert source.drafts(seen, 2)
    seen.request.message = GenerateRequest(
        id=1, rid="r", sampling=SamplingParams(), shares_kv=False
    )
    assert source.drafts(seen, 2) == b""


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_the_tree_says_what_followed(page_size: int) -> None:
    cache = RadixCache(page_size)

    def put(tokens: list[int]) -> None:
        num_pages = len(tokens) // page_size
        cache.insert(CacheKey("", packed(tokens)), np.arange(num_pages, dtype=np.int32))

    put(list(range(16)))
    put([*range(8), *range(50, 58)])

    def following(tokens: list[int], num: int) -> list[int]:
        return unpacked(cache.tree.following(CacheKey("", packed(tokens)), num))

    for length in range(9, 16):
        assert following(list(range(length)), 3) == list(range(length, min(length + 3, 16)))
    assert following(list(range(8)), 4) == [50, 51, 52, 53]  # used last
    assert following([*range(8), 50, 51, 52], 2) == [53, 54]
    assert following(list(range(3)), 10)[:5] == [3, 4, 5, 6, 7]
    assert following([*range(7), 99], 2) == []
    assert following([99], 2) == []
    assert following(list(range(16)), 2) == []
    assert unpacked(cache.tree.following(CacheKey("other", packed([0, 1])), 2)) == []
    cache.check()


@pytest.mark.parametrize("seed", seeds(5, 20))
@pytest.mark.parametrize("top_byte", [128, 129, 200, 255])
def test_what_stands_for_a_picture_is_never_guessed(seed: int, top_byte: int) -> None:
    """Its ids are below 0 (`content_ids`): so is every int32 with such a last byte."""
    rng = random.Random(f"picture {seed}")
    text = [rng.choice([1, 255, 2**24, 2**31 - 1]) for _ in range(8)]
    begin = rng.randrange(9)
    picture = [(top_byte << 24) + rng.randrange(1 << 24) - (1 << 32) for _ in range(8 - begin)]
    assert all(id < 0 for id in picture)
    tokens = [7, *text[:begin], *picture, *text]
    cache = RadixCache(1)
    cache.insert(CacheKey("", packed(tokens)), np.arange(len(tokens), dtype=np.int32))
    expected = text[:begin] if picture else text + text
    assert unpacked(PrefixTree(cache).drafts(known([7], []), 17)) == expected


def test_a_request_that_has_left_the_tree_is_looked_up_again_later() -> None:
    cache = RadixCache(1)
    source = PrefixTree(cache)
    assert source.drafts(known([1, 2], [3]), 2) == b""
    tokens = list(range(1, 60))
    cache.insert(CacheKey("", packed(tokens)), np.arange(len(tokens), dtype=np.int32))
    assert source.drafts(known([1, 2], [3, 4]), 2) == b""
    assert unpacked(source.drafts(known([1, 2], tokens[2:40]), 2)) == [41, 42]
    other = known([1, 2], [3])
    source.forget(other.request)
    assert unpacked(source.drafts(other, 2)) == [4, 5]


def test_sources_are_made_by_name_and_only_where_there_is_something_to_ask() -> None:
    names = [
        source.option for source in make_sources(("prediction", "tree", "ngram"), RadixCache(1))
    ]
    assert names == ["prediction", "tree", "ngram", "ngram"]
    assert [source.option for source in make_sources(("tree",), RadixCache(1, shares=False))] == []


# ---- how many


def test_as_many_drafts_as_have_the_chance_to_be_worth_it() -> None:
    assert num_worthwhile(0.5, 0.1, 8) == 3  # 0.125, but 0.0625 for the fourth
    assert num_worthwhile(0.5, 0.6, 8) == 0
    assert num_worthwhile(0.5, 0.5, 8) == 1
    assert num_worthwhile(0.99, 0.1, 8) == 8
    assert num_worthwhile(1.0, 0.1, 8) == 8
    assert num_worthwhile(0.5, 0.0, 8) == 8


def test_a_rate_learns_from_what_was_seen_and_forgets() -> None:
    rate = HitRate()
    assert rate.value(0.6, 1.0) == 0.6
    rate.learn(4, 4, 0.9)
    assert rate.value(0.6, 1.0) == pytest.approx(4.6 / 5)
    rate.learn(4, 1, 0.9)  # behind the first wrong one nothing is known
    assert rate.value(0.6, 1.0) == pytest.approx((3.6 + 1 + 0.6) / (3.6 + 2 + 1))
    for _ in range(1_000):
        rate.fade(0.99)
    assert rate.value(0.6, 1.0) == pytest.approx(0.6, abs=1e-3)

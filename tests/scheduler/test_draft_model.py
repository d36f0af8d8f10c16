"""A second model guesses, in steps of its own: no output changes, it sees what it must have seen,
and no more is asked of it than what pays."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from tests.scheduler.draft_oracle import DraftOracle
from tests.scheduler.oracle_runner import expected_output
from tests.scheduler.random_worlds import run_random
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.scenes import settings
from tests.scheduler.world import VOCAB, World
from tests.seeds import seeds
from weft.arrays import BoolArray
from weft.messages.requests import Abort
from weft.plan.step import ForwardMode, Plan, Result
from weft.scheduler.batch import Batch
from weft.scheduler.settings import DraftSettings, SchedulerSettings, WindowSettings
from weft.scheduler.speculation.guessing import LEAST_GAIN, TRY_AGAIN_STEPS, DraftShare
from weft.scheduler.speculation.sources import Known, ModelDrafts

PASS_S = 0.001


def seconds(plan: Plan) -> float:
    """A pass of the draft model costs a tenth of a step."""
    if plan.drafting is None:
        return 0.01 + 0.0001 * plan.num_tokens
    return PASS_S * int(plan.drafting.counts.max(initial=1)) + 0.00001 * plan.num_tokens


def with_model(
    sources: str = "draft", vocab_size: int = VOCAB, context_length: int = 1_000, **changes: object
) -> SchedulerSettings:
    draft = DraftSettings(vocab_size=vocab_size, context_length=context_length)
    return settings(speculative=sources, draft=draft, **changes)


def guessing(wrong_every: int = 4, depth: int = 0, **changes: object) -> World:
    """A world with a draft model, which has seen what steps cost."""
    world = World(with_model(**changes), depth)  # type: ignore[arg-type]
    world.tick_s = 0.0001
    world.let_steps_cost(seconds)
    oracle(world).wrong_every = wrong_every
    world.send([9, 8, 7], max_new_tokens=3, ignore_eos=True)
    world.run_dry()
    return world


def oracle(world: World) -> DraftOracle:
    assert world.runner.draft is not None
    return world.runner.draft


def run(world: World, prompt: list[int], length: int) -> int:
    """The steps of the model that a request takes, whose output is as it must be."""
    before = world.num_steps - oracle(world).num_steps
    id = world.send(prompt, max_new_tokens=length, ignore_eos=True)
    world.run_dry()
    assert world.outputs[id] == expected_output(prompt, length, VOCAB, set())
    return world.num_steps - oracle(world).num_steps - before


# ---- whole runs


@pytest.mark.parametrize("seed", seeds(3, 24))
def test_random_schedules_with_a_draft_model_give_the_same_outputs(seed: int) -> None:
    run_random(seed, guesses=True)


def test_right_guesses_take_a_fraction_of_the_steps() -> None:
    world = guessing(wrong_every=0)
    assert run(world, [1, 2, 3, 4, 5], 60) < 20
    stats = world.scheduler.stats()
    assert stats.total_drafts_draft == stats.total_accepted_draft > 40


@pytest.mark.parametrize(
    ("wrong_every", "most_steps", "least_part", "most_part"), [(0, 60, 0.9, 1), (1, 180, 0, 0.4)]
)
def test_with_overlap_steps_wait_for_each_other_only_while_guesses_pay(
    wrong_every: int, most_steps: int, least_part: float, most_part: float
) -> None:
    world = guessing(wrong_every=wrong_every, depth=1)
    run(world, [1, 2, 3], 40)
    blocks: list[bool] = []
    settle = world.scheduler.planner.settle

    def noted(batch: Batch, result: Result, is_eos: BoolArray) -> Result | None:
        blocks.append(batch.blocks_overlap)
        return settle(batch, result, is_eos)

    world.scheduler.planner.settle = noted  # type: ignore[method-assign]
    assert run(world, [1, 2, 3, 4, 5], 150) <= most_steps
    assert least_part <= sum(blocks) / len(blocks) <= most_part


def test_wrong_guesses_are_given_up_and_tried_again_seldom() -> None:
    world = guessing(wrong_every=1)
    for first in range(4):
        run(world, [first, 2, 3, 4], 60)
    tried = oracle(world).num_steps
    assert 0 < tried < 30
    run(world, [1, 2, 3], 60)
    assert oracle(world).num_steps <= tried + 2


def test_a_row_has_guesses_again_after_many_steps_without() -> None:
    world = guessing(wrong_every=1)
    for first in range(40):
        run(world, [first, 2, 3], 20)
    tried = oracle(world).num_steps
    oracle(world).wrong_every = 0
    for first in range(40):
        run(world, [first, 3, 3], 40)
    assert world.num_steps > 3 * TRY_AGAIN_STEPS
    assert oracle(world).num_steps > tried + 3


def test_trials_in_vain_become_rarer() -> None:
    world = guessing(wrong_every=1)
    tried: list[int] = []
    for first in range(60):
        before = oracle(world).num_steps
        world.send([first, 2, 3], max_new_tokens=40, ignore_eos=True)
        world.run_dry(check=False)
        tried += [world.num_steps] * (oracle(world).num_steps > before)
    gaps = np.diff(tried)
    assert gaps.max() > 8 * TRY_AGAIN_STEPS
    rests = gaps[gaps > 1.5 * TRY_AGAIN_STEPS]
    assert (np.diff(rests) > 0).all()


def test_where_guesses_do_not_pay_they_are_seldom_thought_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = guessing(wrong_every=1)
    for first in range(12):
        run(world, [first, 2, 3], 40)
    num_thoughts = 0
    best_count = DraftShare.best_count

    def counted(share: DraftShare, chance: float, most: int) -> int:
        nonlocal num_thoughts
        num_thoughts += 1
        return best_count(share, chance, most)

    monkeypatch.setattr(DraftShare, "best_count", counted)
    before = world.num_steps
    for first in range(3):
        run(world, [first, 5, 3], 40)
    assert 0 < num_thoughts < (world.num_steps - before) / 8


def test_where_only_a_model_guesses_it_is_asked_for_what_it_has_made_and_seldom_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = guessing(wrong_every=1)
    asked = 0
    drafts = ModelDrafts.drafts

    def counted(source: ModelDrafts, known: Known, num_tokens: int) -> bytes:
        nonlocal asked
        asked += 1
        return drafts(source, known, num_tokens)

    monkeypatch.setattr(ModelDrafts, "drafts", counted)
    before = world.num_steps
    num_made = oracle(world).num_steps
    for first in range(6):
        run(world, [first, 5, 3], 40)
    num_made = oracle(world).num_steps - num_made
    assert num_made < asked < 3 * num_made + (world.num_steps - before) / 8


def test_the_draft_model_sees_a_prompt_once_and_not_what_a_request_without_drafts_computes() -> (
    None
):
    world = guessing(wrong_every=0, chunked_prefill_size=16)
    head = [token % VOCAB for token in range(40, 90)]
    run(world, [*head, 1], 30)
    seen = oracle(world).num_tokens
    assert 50 < seen < 50 + 80
    run(world, [*head, 2], 30)  # a hit in the prefix cache counts for both models
    assert oracle(world).num_tokens - seen < 60
    world.send([*head, 3], max_new_tokens=2, ignore_eos=True)  # too short for a guess
    before = oracle(world).num_tokens
    world.run_dry()
    assert oracle(world).num_tokens == before


def test_a_long_prompt_is_made_up_for_in_pieces_between_steps() -> None:
    world = guessing(wrong_every=0, chunked_prefill_size=16)
    plans: list[Plan] = []
    execute = oracle(world).execute

    def noted(plan: Plan, drafting: object) -> object:
        plans.append(plan)
        return execute(plan, drafting)  # type: ignore[arg-type]

    oracle(world).execute = noted  # type: ignore[method-assign, assignment]
    run(world, [token % VOCAB for token in range(100, 160)], 40)
    first = plans[:4]
    assert [plan.num_tokens for plan in first[:3]] == [16, 16, 16]
    assert [plan.drafting.counts.tolist() for plan in first if plan.drafting][:3] == [[0]] * 3
    assert max(plan.num_tokens for plan in plans) == 16


def test_every_step_of_the_draft_model_is_followed_by_one_of_the_model() -> None:
    world = guessing(wrong_every=2)
    modes: list[ForwardMode] = []
    launch = world.runner.launch

    def noted(plan: Plan) -> object:
        modes.append(plan.mode)
        return launch(plan)

    world.runner.launch = noted  # type: ignore[method-assign, assignment]
    for first in range(6):
        world.send([first, 2, 3], max_new_tokens=40, ignore_eos=True)
    world.run_dry()
    assert ForwardMode.DRAFT in modes
    for one, other in pairwise(modes):
        assert (one, other) != (ForwardMode.DRAFT, ForwardMode.DRAFT)


def test_a_request_that_ends_between_a_guess_and_its_step_leaves_nothing() -> None:
    world = guessing(wrong_every=0)
    id = world.send([1, 2, 3], max_new_tokens=60, ignore_eos=True)
    while not (world.scheduler.last_batch and world.scheduler.last_batch.plan.drafting):
        world.step()
    world.abort(Abort(ids=(id,)))
    other = world.send([4, 5, 6], max_new_tokens=30, ignore_eos=True)
    world.run_dry()
    assert world.finished[id].reason == "abort"
    assert world.outputs[other] == expected_output([4, 5, 6], 30, VOCAB, set())


def test_a_draft_model_that_does_not_know_a_token_makes_no_guess_for_its_request() -> None:
    world = guessing(wrong_every=0, vocab_size=VOCAB - 10)
    run(world, [1, VOCAB - 1, 3], 20)
    assert oracle(world).num_steps == 0


def test_a_draft_model_with_a_shorter_context_makes_no_guess_behind_its_end() -> None:
    world = guessing(wrong_every=0, context_length=20)
    run(world, list(range(30)), 20)
    assert oracle(world).num_steps == 0
    run(world, [1, 2, 3], 12)
    assert oracle(world).num_steps > 0


def test_a_guess_that_the_model_has_no_token_for_is_cut() -> None:
    world = guessing(wrong_every=0)
    execute = oracle(world).execute

    def beyond(plan: Plan, drafting: object) -> object:
        result = execute(plan, drafting)  # type: ignore[arg-type]
        result.tokens[1::2] = VOCAB + 3
        return result

    oracle(world).execute = beyond  # type: ignore[method-assign, assignment]
    run(world, [1, 2, 3], 40)
    assert world.scheduler.stats().total_accepted_draft > 5


@pytest.mark.parametrize("depth", [0, 1])
def test_a_journal_with_steps_of_a_draft_model_replays(depth: int) -> None:
    world = RecordedWorld(with_model("prediction,tree,draft,ngram"), depth)
    world.tick_s = 0.0001
    world.let_steps_cost(seconds)
    for first in range(8):
        world.send([first, 2, 3], max_new_tokens=30)
        world.run_dry()
    assert oracle(world).num_steps > 5
    world.replay(check=True)


def test_without_a_draft_model_its_name_is_no_source() -> None:
    assert settings(speculative="draft,ngram").draft_sources == ("ngram",)
    assert with_model("draft,ngram").draft_sources == ("draft", "ngram")
    with pytest.raises(ValueError, match="draft model"):
        with_model(windows=WindowSettings(window=4, num_pages=400))


# ---- how many


def test_as_many_guesses_as_give_the_most_tokens_a_second() -> None:
    share = DraftShare(step_s=1.0, draft_s=0.2)
    assert share.best_count(0.0, 8) == 0
    assert share.best_count(0.2, 8) == 0  # 1.2 tokens in the time of 1.2
    assert share.best_count(0.6, 8) == 2  # 1.6 / 1.2, 1.96 / 1.4, 2.18 / 1.6
    assert share.best_count(1.0, 8) == 8
    assert share.best_count(0.9, 3) == 3
    assert DraftShare(step_s=0.05, draft_s=0.2).best_count(0.9, 8) == 0  # many rows share a step


@pytest.mark.parametrize("seed", range(50))
def test_no_other_number_of_guesses_gives_more_tokens_a_second(seed: int) -> None:
    rng = random.Random(f"share {seed}")
    share = DraftShare(
        step_s=rng.uniform(0.1, 2.0),
        draft_s=rng.uniform(0.0, 0.5),
        guess_s=rng.choice([0.0, rng.uniform(0.0, 1.0)]),
    )
    chance = rng.uniform(0.0, 1.0)
    most = rng.randrange(9)
    rates = [1 / share.step_s]  # by the number of guesses
    for count in range(1, most + 1):
        num_tokens = sum(chance**place for place in range(count + 1))
        rates.append(num_tokens / (share.step_s + share.guess_s + count * share.draft_s))
    best = share.best_count(chance, most)
    if best:
        assert rates[best] > LEAST_GAIN * rates[0]
        assert rates[best] == pytest.approx(max(rates))
    else:
        assert max(rates) <= LEAST_GAIN * rates[0] * (1 + 1e-9)

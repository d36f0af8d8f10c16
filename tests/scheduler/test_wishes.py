"""Words, tokens, budgets and processors in the scheduler: what the plans say, what overlaps, and
the journal of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.engine.engine_world import EngineWorld
from tests.scheduler.grammars import VOCABULARY, WORDS, Bench, choice, obey_masks, until_compiled
from tests.scheduler.obeying import calls, obey
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.scenes import settings
from weft.messages.sampling import InvalidParam, Processor, SamplingParams, ThinkingMarks
from weft.plan.logits import ANY, LogitBias
from weft.plan.step import find
from weft.scheduler.features.thinking import NOTHING, OVER, due

PROMPT = list(range(10, 30))
MARKS = ThinkingMarks((100, 101), (102, 103, 102, 104), is_open=False)
FREE = {"max_new_tokens": 20, "ignore_eos": True}


class Known:
    """Processors that may have no parameter "bad"."""

    def wrong(self, name: str, params: Mapping[str, Any]) -> str:
        return "bad is bad" if "bad" in params else ""


def due_after(*tokens: int, budget: int = 3, marks: ThinkingMarks = MARKS) -> int:
    return due(np.array(tokens, dtype=np.int32), marks, budget)


def test_a_budget_counts_from_the_first_mark_to_the_second() -> None:
    assert due_after(100, 101, 1, 2) == NOTHING
    assert due_after(100, 101, 1, 2, 3) == 102
    assert due_after(100, 101, 1, 2, 3, 102) == 103
    assert due_after(100, 101, 1, 102, 103, 102) == 104  # it has begun to end by itself
    assert due_after(100, 101, 1, 102, 103, 102, 103) == 102  # not so: the mark begins anew
    assert due_after(100, 101, 102, 103, 102, 104, 7, 8, 9) == OVER
    assert due_after(1, 2, 3, 4, 100, 101, 1, 2, 3) == 102
    assert due_after(1, 2, 3, 4) == NOTHING
    assert due_after(1, 2, 3, 4, 5, 100, 101, 1, 2, 3) == OVER  # an answer that has the mark in it
    is_open = ThinkingMarks((100, 101), (102,), is_open=True)
    assert due_after(budget=0, marks=is_open) == 102
    assert due_after(1, 2, 3, marks=is_open) == 102
    assert due_after(100, 101, 1, 2, marks=is_open) == NOTHING
    assert due_after(1, 102, 3, marks=is_open) == OVER


@pytest.mark.parametrize("marks", [((1,), (300,)), ((1,), ()), ((), (1,))])
def test_marks_that_no_token_can_be_are_refused(
    marks: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    with pytest.raises(InvalidParam, match=r"thinking_marks|no tokens"):
        SamplingParams(thinking_budget=1, thinking_marks=ThinkingMarks(*marks, is_open=True)).check(
            300
        )


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_processor_is_told_the_whole_output_though_steps_overlap(depth: int) -> None:
    world = EngineWorld(settings(), depth, processors=Known())
    plans = obey(world.runner)
    ids = [
        world.send([*PROMPT, i], processors=(Processor("p", {"i": i}),), **FREE) for i in range(3)
    ]
    other = world.send([*PROMPT, 50], **FREE)
    world.run_dry()
    world.check_outputs()
    told = {id: [] for id in ids}
    for plan in plans:
        for one in calls(plan):
            for params, tokens, start in zip(one.params, one.tokens, one.prompt_lens, strict=True):
                told[ids[params["i"]]].append(tokens[start:].tolist())
    for id in ids:
        assert told[id] == [world.outputs[id][:n] for n in range(20)]
    assert len(world.outputs[other]) == 20


def test_only_steps_that_the_next_one_depends_on_are_awaited() -> None:
    def awaited(**sampling: Any) -> list[bool]:
        world = EngineWorld(settings(), 1, processors=Known())
        found = []
        obey(world.runner)
        world.send(PROMPT, **{**FREE, "max_new_tokens": 8, **sampling})
        while world.has_work:
            before = world.scheduler.planner.num_steps
            world.step()
            if (
                world.scheduler.planner.num_steps > before
                and world.scheduler.last_batch is not None
            ):
                found.append(world.scheduler.last_batch.blocks_overlap)
        return found

    is_open = ThinkingMarks((100,), (102, 103), is_open=True)
    assert not any(awaited(bad_word_ids=((1, 2, 3), (4,)), allowed_token_ids=tuple(range(200))))
    assert all(awaited(processors=(Processor("p"),)))
    at = awaited(thinking_budget=3, thinking_marks=is_open)
    assert at == [False, False, True, True, True, False, False, False]


@pytest.mark.parametrize("depth", [0, 1])
def test_bad_words_leave_their_last_but_one_token_to_the_device(depth: int) -> None:
    world = EngineWorld(settings(), depth)
    plans = obey(world.runner)
    first = world.send(PROMPT, **FREE)
    world.run_dry()
    a, b, c, d = world.outputs[first][5:9]
    plans.clear()
    world.send(PROMPT, bad_word_ids=((a, b, c, d), (b, 7), (9,)), **FREE)
    world.run_dry()
    biases = [find(plan.logits, LogitBias) for plan in plans]
    pairs = [sorted(zip(bias.after, bias.tokens, strict=True)) for bias in biases]  # type: ignore[union-attr, arg-type]
    assert pairs[0] == [(ANY, 9)]
    usual = sorted([(ANY, 9), (b, 7)])
    assert pairs[1:8] == [usual] * 7
    assert pairs[8] == sorted([*usual, (c, d)])
    assert pairs[9:] == [usual] * 11


@pytest.mark.parametrize("puts_aside", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_journal_with_processors_budgets_and_words_is_replayed_without_them(
    depth: int, puts_aside: bool
) -> None:
    world = RecordedWorld(settings(num_pages=90), depth, processors=Known())
    if puts_aside:
        world.put_aside_often()
    obey(world.runner)
    is_open = ThinkingMarks((100,), (102, 103), is_open=True)
    broken = [world.send([*PROMPT, i], processors=(Processor("breaks"),), **FREE) for i in range(2)]
    refused = world.send(PROMPT, processors=(Processor("p", {"bad": 1}),), **FREE)
    world.send(PROMPT, thinking_budget=4, thinking_marks=is_open, **FREE)
    world.send(PROMPT, bad_word_ids=((1, 2), (3,)), allowed_token_ids=(5, 6, 7), **FREE)
    world.run_dry()
    world.check_idle()
    for id in broken:
        assert world.finished[id].reason == "error"
        assert world.finished[id].message == "it broke"
        assert len(world.outputs[id]) == 2
    assert world.finished[refused].status == 400
    assert world.finished[refused].message == "bad is bad"
    world.replay(check=True)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_grammar_takes_over_where_the_budget_has_ended_the_reasoning(depth: int) -> None:
    bench = Bench()
    world = EngineWorld(settings(), depth, grammars=bench.pool)
    obey_masks(world.runner)
    obey(world.runner)
    is_open = ThinkingMarks((100,), (102, 103), is_open=True)
    grammar = replace(choice(), behind=is_open)
    thinks = {
        "thinking_budget": 5,
        "thinking_marks": is_open,
        "grammar": grammar,
        "max_new_tokens": 60,
    }
    ids = [world.send([*PROMPT, i], ignore_eos=True, **thinks) for i in range(6)]
    until_compiled(world, bench)
    world.run_dry()
    bench.pool.close()
    for id in ids:
        assert world.outputs[id][5:7] == [102, 103]
        answer = b"".join(VOCABULARY[token] for token in world.outputs[id][7:]).decode()
        assert (answer in WORDS, world.finished[id].reason) == (True, "stop")

"""What a head learns from, and that it learns and guesses."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from training import head, questions, recorded, teach_head
from training.recorded import Lesson
from weft import LLM, SamplingParams

SHAPE = head.HeadShape(
    num_heads=2, num_kv_heads=1, head_dim=32, intermediate_size=64, num_logits=512
)


def test_no_question_that_is_measured_with_has_been_learnt() -> None:
    learnt = questions.learnt(10_000)
    unseen = questions.unseen(10_000)
    assert len(set(learnt) | set(unseen)) == len(learnt) + len(unseen) > 5_000
    assert questions.learnt(50) == learnt[:50]


def test_a_chain_looks_at_what_stands_before() -> None:
    states = torch.tensor([[1.0], [2.0], [3.0]])
    assert head.moved(states, 1).tolist() == [[0.0], [1.0], [2.0]]
    assert head.moved(states, 2).tolist() == [[0.0], [0.0], [1.0]]


def test_each_pass_takes_every_lesson_once() -> None:
    lessons = [
        Lesson(torch.zeros(5 + number % 7, dtype=torch.int64), torch.zeros(0), number)
        for number in range(20 * teach_head.LESSONS)
    ]
    for first in (0, 20):
        steps = range(first, first + 20)
        seen = Counter(one.begin for step in steps for one in teach_head.taken(lessons, step))
        assert set(seen.values()) == {1}
        assert len(seen) == len(lessons)


def test_a_head_learns_from_recorded_answers_and_guesses_in_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "MOST_TOKENS", 40)
    monkeypatch.setattr(teach_head, "WARM_UP_STEPS", 4)
    torch.manual_seed(1)
    of = head.target("weft-nano")
    ids = torch.arange(SHAPE.num_logits)
    untaught = head.Head(SHAPE, of.hidden, len(of.reads))
    untaught.begin_with(of, ids)
    head.export(untaught, of, ids, tmp_path / "blank")

    asked = questions.learnt(6)
    recorded.record("weft-nano", tmp_path / "blank", asked, tmp_path / "learnt", 1)
    lessons = recorded.read(tmp_path / "learnt")
    assert len(lessons) == len(asked)
    for greedy in lessons[::2]:
        logits = of.logits(greedy.states[greedy.begin - 1 : -1, -of.hidden :], of.rows)
        agreed = (logits.argmax(-1) == greedy.tokens[greedy.begin :]).float().mean()
        assert agreed > 0.9  # states are kept in bfloat16

    can = head.Guessable(lessons, SHAPE.num_logits, len(of.rows))
    learning = head.Head(SHAPE, of.hidden, len(of.reads))
    learning.begin_with(of, can.ids, lessons)
    before = head.rightness(learning, lessons, of, can, 2)
    training = teach_head.Training(learning, tmp_path / "checkpoint.pt")
    rows = of.rows[can.ids]
    for _ in range(12):
        loss = head.loss_of(learning, head.batch_of(lessons, of), of, can, rows)
        training.step(loss, 0.0)
    after = head.rightness(learning, lessons, of, can, 2)
    assert min(after[0].greedy, after[1].greedy) > max(before[0].greedy, 0.3)

    training.save()
    again = head.Head(SHAPE, of.hidden, len(of.reads))
    resumed = teach_head.Training(again, tmp_path / "checkpoint.pt")
    assert resumed.steps == 12
    assert torch.equal(again.lm_head.weight, learning.lm_head.weight)

    head.export(learning, of, can.ids, tmp_path / "head")
    llm = LLM(
        "weft-nano",
        threads=1,
        kv_tokens=1024,
        draft_model=str(tmp_path / "head"),
        speculative="eagle3",
        max_draft=1,  # how many more pay depends on the machine
    )
    llm.generate(
        [lessons[0].tokens[: lessons[0].begin].tolist()],
        SamplingParams(max_new_tokens=30, temperature=0),
    )
    counted = llm._own.engine.services.stats()  # type: ignore[union-attr]
    assert counted.total_accepted_eagle3 > counted.total_drafts_eagle3 / 3 > 0

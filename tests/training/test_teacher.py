"""What a teacher gives: prompts that end where it goes on, rows of what it writes with what it
expects, and a model that gets more like it. weft-nano is the teacher, and writes a few tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from training import corpus, teacher
from training.model import Shape
from training.sample import load
from training.teacher import Lessons
from training.train import Teaching, Trainer
from weft.weights.known import BUNDLED as NANO

DOCS = [corpus.Document("one.py", 'def one():\n    """Return one."""\n    x = 1\n    return x\n')]
TINY = Shape(
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=32,
)


@pytest.fixture(scope="module")
def cut() -> Tokenizer:
    return Tokenizer.from_file(str(NANO / "tokenizer.json"))


@pytest.fixture(scope="module")
def taught(cut: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Lessons:
    """Short rows: most of each is what stands in the prompt."""
    file = tmp_path_factory.mktemp("work") / "lessons.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher, "ROW_LEN", 40)
        patch.setattr(teacher, "MAX_PROMPT", 32)
        made = teacher.lessons(NANO, file, DOCS, cut, 6)
        again = teacher.lessons(Path("not read"), file, DOCS, cut, 6)
    for one, other in zip(made, again, strict=True):
        assert torch.equal(one, other)
    return made


def test_prompts_of_conversations_end_where_the_assistant_goes_on(cut: Tokenizer) -> None:
    made = [cut.decode(ids, skip_special_tokens=False) for ids in teacher.prompts(DOCS, cut, 40)]
    num_chats = sum(text.endswith("<|im_start|>assistant\n") for text in made)
    assert 20 < num_chats < 40
    assert made == [
        cut.decode(ids, skip_special_tokens=False) for ids in teacher.prompts(DOCS, cut, 40)
    ]


def test_lessons_hold_what_the_teacher_expects_where_it_wrote(taught: Lessons) -> None:
    """The training model computes the same probabilities from the same weights."""
    ids, likely, chances = teacher.batch(taught, 0, 6)
    with torch.no_grad():
        logits = load(NANO)(ids[:, :-1]) / 0.7
    expected = logits.gather(-1, likely).softmax(-1)
    is_lesson = chances.sum(-1) > 0
    assert is_lesson.any(-1).all()
    assert not is_lesson[:, 0].any()
    assert torch.allclose(chances.sum(-1)[is_lesson], torch.tensor(1.0), atol=0.01)
    assert torch.allclose(expected[is_lesson], chances[is_lesson], atol=0.03)


def test_a_model_is_like_itself_and_others_get_more_like_it(taught: Lessons) -> None:
    itself = teacher.compare(load(NANO), taught)
    assert itself.overlap > 0.9
    assert itself.greedy > 0.97
    trainer = Trainer(TINY, is_taught=True)
    before = teacher.compare(trainer.model, taught)
    batch = tuple(teacher.batch(taught, 0, 6))
    for _ in range(12):
        trainer.step(batch, 0.01)
    after = teacher.compare(trainer.model, taught)
    assert after.taught_loss < before.taught_loss - 0.5
    assert after.overlap > before.overlap


def test_the_last_rows_are_held_out() -> None:
    tokens = torch.arange(40, dtype=torch.int16)[:, None].repeat(1, 3)
    places = torch.zeros(40, 2, 2)
    course = Teaching(Lessons(tokens, places.short(), places))
    seen = {int(row) for rows in range(0, 16, 4) for row in course.batch(rows, 0.0)[0][:, 0]}
    assert seen == set(range(8))

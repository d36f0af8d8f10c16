"""Answers of a model with what its layers made of them: weft writes the answers, and on the way keeps the hidden states
that a head would read. They are those of the served model, with its codes and kernels, and cost nothing besides. Knows
nothing about optimizers.

    tokens   | t0 | t1 | ..       | t(n-1) |     of one conversation, prompt and answer
    states   | s0 | s1 | .. s(n-2) | zeros |     [n, reads * hidden], of the layers that the head reads
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from weft import LLM, SamplingParams
from weft.engine.engine import Engine
from weft.executor.device import DeviceOutput
from weft.executor.heads.guessing import HeadPass
from weft.executor.heads.states import HiddenPool
from weft.executor.runner import Pass, Run, TorchRunner
from weft.plan.step import Plan

AT_ONCE = 96  # conversations that the engine writes together
IN_A_FILE = 256
MOST_TOKENS = 320  # of an answer: longer ones of small models repeat themselves
LONGEST = 1024  # tokens of a conversation
TEMPERATURE = 0.7  # of every other answer; the others are greedy


class Lesson(NamedTuple):
    """A conversation of n tokens, of which the answer begins at `begin`."""

    tokens: Tensor  # [n] int64
    states: Tensor  # [n, reads * hidden] bfloat16
    begin: int


class Recorder(Pass):
    """Copies the states of each row's tokens as they are computed. A token of a wrong guess is
    written over by the right one."""

    name = "recorder"

    def __init__(self, pool: HiddenPool, longest: int) -> None:
        num_rows = len(pool.carried)
        self._kept = pool.kept
        self._states = torch.zeros(num_rows, longest, pool.kept.shape[1], dtype=torch.bfloat16)
        self._lens = [0] * num_rows
        self._prompts: list[list[int]] = [[] for _ in range(num_rows)]
        self._ended: dict[tuple[int, ...], Tensor] = {}

    def run(self, plan: Plan, then: Run) -> DeviceOutput:
        output = then(plan)
        if plan.drafting is not None:
            return output
        at = 0
        for row, start, num in zip(
            plan.rows.tolist(), plan.starts.tolist(), plan.lens.tolist(), strict=True
        ):
            here = slice(at, at + num)
            at += num
            if start == 0:
                self._end(row)
            tokens = plan.tokens[here].tolist()
            if len(self._prompts[row]) == start and min(tokens) >= 0:
                self._prompts[row] += tokens
            slots = torch.from_numpy(plan.slots[here].astype(np.int64))
            self._states[row, start : start + num] = self._kept[slots]
            self._lens[row] = start + num
        return output

    def take(self) -> dict[tuple[int, ...], Tensor]:
        """The states of everything since the last call, by prompts. Nothing may be running."""
        for row in range(len(self._lens)):
            self._end(row)
        taken, self._ended = self._ended, {}
        return taken

    def _end(self, row: int) -> None:
        if self._lens[row]:
            states = self._states[row, : self._lens[row]].clone()
            self._ended[tuple(self._prompts[row])] = states
        self._lens[row] = 0
        self._prompts[row] = []


class Writer:
    """A model that writes answers, beside a head whose guesses do not matter."""

    def __init__(self, model: str, head: Path) -> None:
        self._llm = LLM(
            model,
            draft_model=str(head),
            speculative="eagle3",
            threads=1,
            kv_tokens=AT_ONCE * (MOST_TOKENS + 128),
            max_running_requests=AT_ONCE,
            prefix_cache=False,
        )
        engine = self._llm._own.engine
        assert isinstance(engine, Engine)
        around = engine.surroundings
        assert isinstance(around.runner, TorchRunner)
        (states,) = [one.states for one in around.runner.passes if isinstance(one, HeadPass)]
        assert states is not None
        self._recorder = Recorder(states, LONGEST)
        engine.surroundings = around._replace(runner=around.runner.within(self._recorder))
        engine.start_over()

    def lessons(self, questions: Sequence[str], first: int, turn: int) -> list[Lesson]:
        """The answers to different questions, of which the first has this number. In each `turn`
        the greedy ones are others."""
        asked = [self._llm.chat_ids([{"role": "user", "content": text}]) for text in questions]
        params = [
            SamplingParams(
                max_new_tokens=MOST_TOKENS,
                temperature=TEMPERATURE * ((number + turn) % 2),
                seed=2 * number + turn,
            )
            for number in range(first, first + len(asked))
        ]
        outputs = self._llm.generate(asked, params)
        states = self._recorder.take()
        found = []
        for prompt, output in zip(asked, outputs, strict=True):
            tokens = torch.tensor([*prompt, *output.token_ids])
            own = states.get(tuple(prompt))
            if own is None or len(own) < len(tokens) - 1:
                continue  # it was retracted, and went on elsewhere
            padded = torch.cat([own[: len(tokens) - 1], torch.zeros_like(own[:1])])
            found.append(Lesson(tokens, padded, len(prompt)))
        return found


def record(model: str, head: Path, questions: list[str], folder: Path, turns: int) -> None:
    """Write the answers to all questions `turns` times, in files of IN_A_FILE; those that are there
    already stay."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(turn, first) for turn in range(turns) for first in range(0, len(questions), IN_A_FILE)]
    missing = [job for job in jobs if not file_of(folder, *job).exists()]
    if not missing:
        return
    writer = Writer(model, head)
    for turn, first in missing:
        began = time.monotonic()
        lessons = writer.lessons(questions[first : first + IN_A_FILE], first, turn)
        save(lessons, file_of(folder, turn, first))
        num = sum(len(lesson.tokens) for lesson in lessons)
        seconds = time.monotonic() - began
        print(f"turn {turn}, from {first}: {num:,} tokens in {seconds:.0f} s", flush=True)


def file_of(folder: Path, turn: int, first: int) -> Path:
    return folder / f"part-{turn}-{first:05d}.safetensors"


def save(lessons: list[Lesson], file: Path) -> None:
    """Write them; a crash leaves no part of a file."""
    partial = file.with_suffix(".partial")
    tensors = {
        "tokens": torch.cat([lesson.tokens.int() for lesson in lessons]),
        "states": torch.cat([lesson.states for lesson in lessons]),
        "lens": torch.tensor([len(lesson.tokens) for lesson in lessons]),
        "begins": torch.tensor([lesson.begin for lesson in lessons]),
    }
    save_file(tensors, partial)
    os.replace(partial, file)


def read(folder: Path) -> list[Lesson]:
    """All lessons of a folder, in the order of its files, whose content is read when it is used."""
    found: list[Lesson] = []
    for file in sorted(folder.glob("part-*.safetensors")):
        parts = load_file(file)
        lens = parts["lens"].tolist()
        split = zip(
            torch.split(parts["tokens"], lens),
            torch.split(parts["states"], lens),
            parts["begins"].tolist(),
            strict=True,
        )
        found += [Lesson(tokens, states, begin) for tokens, states, begin in split]
    return found

"""The engine's own loop lets a step take as long as it was told to, listens meanwhile, and loads at
its first rest what only some requests need."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pytest

from tests.scheduler.oracle_runner import OracleRunner
from tests.scheduler.scenes import settings
from tests.scheduler.world import VOCAB
from weft.engine.engine import Engine
from weft.engine.intake import Intake
from weft.launch import worker
from weft.messages.control import GetState, GetStateReply, SlowDown, SlowDownReply
from weft.messages.replies import StepOutput
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.messages.status import Shutdown

STEP_S = 0.04
Run: TypeAlias = Callable[[list[tuple[float, Any]]], list[tuple[float, Any]]]


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


def fail(exc: Exception) -> None:
    raise exc


@dataclass
class Line:
    """Messages that come at their time, in the place of a socket; also who sleeps until one has
    come."""

    coming: list[tuple[float, Any]]  # when, message; in order
    clock: Clock = field(default_factory=Clock)
    num_dropped: int = 0

    def __post_init__(self) -> None:
        self.coming = [(self.clock.now + when, message) for when, message in self.coming]

    def drain(self, limit: int) -> list[Any]:
        arrived = [message for when, message in self.coming if when <= self.clock.now]
        self.coming = [one for one in self.coming if one[0] > self.clock.now]
        return arrived[:limit]

    def wait(self, timeout_s: float) -> bool:
        until = min([self.clock.now + timeout_s, *(when for when, _ in self.coming)])
        self.clock.now = max(until, self.clock.now)
        return bool(self.coming) and self.coming[0][0] <= self.clock.now


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """What an engine answers to what comes, and when; `None` when it had its first rest."""

    def run(coming: list[tuple[float, Any]]) -> list[tuple[float, Any]]:
        line = Line(coming)
        clock = line.clock
        began = line.clock.now
        monkeypatch.setattr(worker, "time", clock)
        answers: list[tuple[float, Any]] = []

        def note(answer: Any = None) -> None:
            answers.append((clock.now - began, answer))

        runner = OracleRunner(400, 4, 200, VOCAB)
        engine = Engine(settings(), runner, clock=clock.monotonic, overlap=0, on_failure=fail)
        intake = Intake(line, note)
        worker.serve(engine, contextlib.nullcontext(), intake, line, note)  # type: ignore[arg-type]
        return answers

    return run


def request(num_tokens: int, id: int = 1) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    return GenerateRequest(
        id=id, rid=f"r{id}", input_ids=np.array([5], dtype=np.int32).tobytes(), sampling=sampling
    )


def end_of(answers: list[tuple[float, Any]]) -> float:
    (when,) = [when for when, reply in answers if isinstance(reply, StepOutput) and reply.finished]
    return when


def when(answers: list[tuple[float, Any]], kind: type) -> list[float]:
    return [at for at, reply in answers if isinstance(reply, kind)]


def test_every_step_takes_as_long_as_it_must(run: Run) -> None:
    answers = run(
        [
            (0, SlowDown(call=1, forward_sleep_time=STEP_S)),
            (0, request(5)),
            (0, Shutdown(drain_s=60)),
        ]
    )
    tokens = when(answers, StepOutput)
    assert len(tokens) == 5
    gaps = np.diff(tokens)
    assert gaps == pytest.approx(STEP_S)


def test_a_slowed_engine_answers_at_once_and_is_fast_again_when_it_is_reported(run: Run) -> None:
    coming = [
        (0, SlowDown(call=1, forward_sleep_time=30.0)),
        (0, request(50)),
        (0.05, GetState(call=2)),
        (0.10, SlowDown(call=3, forward_sleep_time=None)),
        (0.15, Shutdown(drain_s=60)),
    ]
    answers = run(coming)
    assert when(answers, GetStateReply)[0] == pytest.approx(0.05)
    assert when(answers, SlowDownReply)[1] == pytest.approx(0.10)
    assert end_of(answers) == pytest.approx(0.10)


def test_what_may_hold_up_steps_waits_for_the_first_rest(run: Run) -> None:
    busy = [(0.9 * number, request(1, id=number)) for number in range(5)]
    answers = run([*busy, (60.0, Shutdown(drain_s=60))])
    assert when(answers, type(None)) == [pytest.approx(3.6 + worker.REST_S)]

"""The engine's own loop lets a step take as long as it was told to, and listens meanwhile."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.scheduler.oracle_runner import OracleRunner
from tests.scheduler.test_scheduler import settings
from tests.scheduler.world import VOCAB
from weft.launch.worker import serve
from weft.messages.control import GetState, GetStateReply, Shutdown, SlowDown, SlowDownReply
from weft.messages.replies import StepOutput
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.scheduler.service.engine import Engine
from weft.scheduler.service.intake import Intake

STEP_S = 0.04


def fail(exc: Exception) -> None:
    raise exc


@dataclass
class Line:
    """Messages that come at their time, in the place of a socket; also who sleeps until one has come."""

    coming: list[tuple[float, Any]]  # when, message; in order
    began: float = field(default_factory=time.monotonic)
    num_dropped: int = 0

    def drain(self, limit: int) -> list[Any]:
        now = time.monotonic() - self.began
        arrived = [message for when, message in self.coming if when <= now]
        self.coming = [one for one in self.coming if one[0] > now]
        return arrived[:limit]

    def wait(self, timeout_s: float) -> bool:
        now = time.monotonic() - self.began
        until = min([now + timeout_s, *(when for when, _ in self.coming)])
        time.sleep(max(until - now, 0.0))
        return bool(self.coming) and self.coming[0][0] <= time.monotonic() - self.began


def run(coming: list[tuple[float, Any]]) -> list[tuple[float, Any]]:
    """What an engine answers to `coming`, and when."""
    line = Line(coming)
    answers: list[tuple[float, Any]] = []
    engine = Engine(settings(), OracleRunner(400, 4, 200, VOCAB), clock=time.monotonic, overlap=0, on_failure=fail)
    intake = Intake(line, lambda reply: answers.append((time.monotonic() - line.began, reply)))
    serve(engine=engine, heart=contextlib.nullcontext(), intake=intake, sleeper=line)  # type: ignore[arg-type]
    return answers


def request(num_tokens: int) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    return GenerateRequest(id=1, rid="r", input_ids=np.array([5], dtype=np.int32).tobytes(), sampling=sampling)


def end_of(answers: list[tuple[float, Any]]) -> float:
    (when,) = [when for when, reply in answers if isinstance(reply, StepOutput) and reply.finished]
    return when


def when(answers: list[tuple[float, Any]], kind: type) -> list[float]:
    return [at for at, reply in answers if isinstance(reply, kind)]


def test_every_step_takes_as_long_as_it_must() -> None:
    answers = run([(0, SlowDown(call=1, step_s=STEP_S)), (0, request(5)), (0, Shutdown(drain_s=60))])
    tokens = when(answers, StepOutput)
    assert len(tokens) == 5
    gaps = np.diff(tokens)
    assert gaps.min() > 0.9 * STEP_S
    assert np.median(gaps) == pytest.approx(STEP_S, rel=0.5)


def test_a_slowed_engine_answers_at_once_and_is_fast_again_when_it_is_told() -> None:
    coming = [
        (0, SlowDown(call=1, step_s=30.0)),
        (0, request(50)),
        (0.05, GetState(call=2)),
        (0.10, SlowDown(call=3, step_s=None)),
        (0.15, Shutdown(drain_s=60)),
    ]
    answers = run(coming)
    assert when(answers, GetStateReply)[0] == pytest.approx(0.05, abs=0.04)
    assert when(answers, SlowDownReply)[1] == pytest.approx(0.10, abs=0.04)
    assert end_of(answers) < 0.5

"""Requests that are slow to begin are explained in the log and counted by cause, few of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.client.completions import make_completion
from tests.examples import example_of
from weft.client import slow_requests
from weft.client.engine_state import EngineUnavailable
from weft.client.slow_requests import SlowRequests
from weft.messages.control import CacheCause, Explanation, TimePart
from weft.messages.sampling import SamplingParams
from weft.observe.metrics import Metrics

CAUSE = CacheCause(
    cause="changed",
    rid="other",
    same_tokens=4,
    changed_tokens=1,
    replaced_tokens=1,
    missed_tokens=100,
    missed_s=0.5,
    ours=[],
    theirs=[],
    words="",
    advice="do better",
)
TIMES = [TimePart(part="queue", seconds=0.25), TimePart(part="prefill", seconds=3.0)]
STORY = example_of(Explanation, rid="r", cache_cause=CAUSE, times=TIMES)


def counts(metrics: Metrics) -> dict[str, str]:
    lines = metrics.render().decode().splitlines()
    found = [line for line in lines if line.startswith(("weft:slow_", "weft:cache_missed_"))]
    return dict(line.rsplit(" ", 1) for line in found if "_created" not in line)


def explained(
    monkeypatch: pytest.MonkeyPatch,
    first_tokens_s: list[float],
    *,
    longest_s: float = 1.0,
    background: bool = False,
) -> tuple[Metrics, list[int]]:
    """Let completions end whose first tokens came so late. Returns the numbers that the engine was
    asked about."""
    monkeypatch.setattr(slow_requests, "PAUSE_S", 0.0)
    metrics = Metrics()
    asked: list[int] = []

    async def ask(rid: str, *, number: int) -> list[Explanation]:
        asked.append(number)
        if len(asked) == 2:
            raise EngineUnavailable("it is away")
        return [STORY]

    async def end_all() -> None:
        slow = SlowRequests(ask, metrics.completions.misses, longest_s)
        for first_s in first_tokens_s:
            completion = make_completion(SamplingParams(), background=background)
            completion.first_token_at = first_s
            slow.note(completion, 100.0)
        for _ in range(10 * len(first_tokens_s)):
            await asyncio.sleep(0)

    asyncio.run(end_all())
    return metrics, asked


def test_a_slow_request_is_explained_and_a_fast_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(slow_requests.log, "info", lambda event, **fields: told.append(fields))
    metrics, asked = explained(monkeypatch, [0.5, 1.5])
    assert asked == [1]
    assert counts(metrics) == {
        'weft:slow_requests_total{cause="changed"}': "1.0",
        'weft:cache_missed_tokens_total{cause="changed"}': "100.0",
        'weft:cache_missed_seconds_total{cause="changed"}': "0.5",
    }
    assert told == [
        {
            "rid": "r",
            "first_token_s": 1.5,
            "cache_cause": "changed",
            "missed_tokens": 100,
            "missed_s": 0.5,
            "most_in": "prefill",
            "most_s": 3.0,
            "advice": "do better",
        }
    ]


def test_an_engine_that_is_away_stops_no_later_explanation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metrics, asked = explained(monkeypatch, [2.0, 2.0, 2.0])
    assert len(asked) == 3
    assert counts(metrics)['weft:slow_requests_total{cause="changed"}'] == "2.0"


def test_only_so_many_wait_to_be_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_requests, "MAX_WAITING", 4)
    _, asked = explained(monkeypatch, [2.0] * 9)
    assert len(asked) == 4


def test_a_completion_without_a_token_is_slow_from_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, asked = explained(monkeypatch, [0.0], longest_s=99.0)
    assert asked == [1]


def test_a_background_request_that_waits_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked = explained(monkeypatch, [2.0], background=True)
    assert asked == []

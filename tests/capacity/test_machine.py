"""What was measured: the front, the speed, and the file for another machine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.capacity.machines import MACHINE, USERS
from weft.bench.played import PlayedRequest, PlayedTrace
from weft.capacity.machine import MAX_STRETCHES, FrontCost, fit_front, merged
from weft.cli.capacity import measure
from weft.cli.capacity.plan import PlanFile, read_machine
from weft.config.options import SettingsError
from weft.sim.speed import Stretch
from weft.sim.trace import Arrival


def test_the_time_of_the_front_is_found_among_disturbed_requests() -> None:
    rng = np.random.default_rng(0)
    lens = rng.integers(10, 1_000, 60).tolist()
    seconds = [0.004 + 1e-5 * length for length in lens]
    seconds[::10] = [0.5] * 6
    front = fit_front(lens, seconds)
    assert front.request_s == pytest.approx(0.004, rel=0.05)
    assert front.token_s == pytest.approx(1e-5, rel=0.05)


def test_without_requests_the_front_takes_no_time() -> None:
    assert fit_front([], []) == FrontCost()


def test_a_slow_machine_is_measured_with_a_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    nothing: Any = None
    clock = SimpleNamespace(perf_counter=lambda: now_s)

    async def shape(client: object) -> measure.Shape:
        return measure.Shape(rows=32, longest=2_000, chunk=512)

    async def play(client: object, arrivals: Sequence[Arrival], **chats: Coroutine) -> PlayedTrace:
        nonlocal now_s
        now_s += 2.0  # of 20: three loads warm it, two are measured, then come chats
        for leaves in chats.values():
            leaves.close()
        return PlayedTrace([PlayedRequest() for _ in arrivals], nothing)

    monkeypatch.setattr(measure, "_shape", shape)
    monkeypatch.setattr(measure, "play", play)
    monkeypatch.setattr(measure, "_set_chunk", lambda url, chunk: None)
    monkeypatch.setattr(measure, "time", clock)
    sent = asyncio.run(measure._all_loads("http://nowhere", 20.0, USERS))
    assert sent.warm_s == 6.0
    assert [len(trace.requests) for trace in sent.traces[:-1]] == [1, 1, 4]


def test_many_stretches_become_few_with_the_same_work() -> None:
    stretches = [Stretch(2.0 * n, 2.0 * n + 1, 0.5 + n % 2) for n in range(1_000)]
    found = merged(stretches)
    assert len(found) <= MAX_STRETCHES
    assert found[-1][1] == pytest.approx(1_000)
    assert sum(usual_s for _, _, usual_s in found) == pytest.approx(1_000)
    assert merged([]) == ()


def test_a_machine_in_a_file_is_the_same_machine(tmp_path) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(msgspec.json.encode({"machine": msgspec.to_builtins(MACHINE), "knee": 3}))
    assert read_machine(str(file)) == MACHINE
    assert msgspec.json.decode(msgspec.json.encode(PlanFile(MACHINE)), type=PlanFile) == PlanFile(
        MACHINE
    )


@pytest.mark.parametrize("content", ["{}", "not json", '{"machine": {"name": 3}}'])
def test_a_file_without_a_machine_is_refused_by_name(content: str, tmp_path) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(SettingsError, match=r"--cost: .*other\.json is no answer"):
        read_machine(str(file))
    with pytest.raises(SettingsError, match="cannot read"):
        read_machine(str(tmp_path / "none"))

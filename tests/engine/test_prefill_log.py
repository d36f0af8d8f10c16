"""The lines about steps with prompts, while the log has lines of the level debug."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.engine_world import EngineWorld, request
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.scenes import settings
from weft.messages.control import ConfigureLogging, SetInternalState
from weft.observe import log


@pytest.fixture(autouse=True)
def _kept_level() -> Iterator[None]:
    before = log.get_level()
    yield
    log.set_level(before)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of the lines since the last call."""
    found = [record.fields for record in caplog.records if record.message == "prefill"]
    caplog.clear()
    return found


def world_of(level: str) -> EngineWorld:
    log.set_level(level)
    return EngineWorld(
        settings(num_pages=40, page_size=4, context_length=200, chunked_prefill_size=16)
    )


def test_each_step_with_prompts_is_a_line_and_their_sums_are_the_counters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = world_of("debug")
    prompt = list(range(1, 42))
    world.send(prompt, max_new_tokens=2)
    world.send([5, 6, 7], max_new_tokens=2)
    world.run_dry()
    world.send(prompt, max_new_tokens=2)
    world.run_dry()
    found = lines(caplog)
    counters = world.scheduler.counters
    assert len(found) == counters.steps.num_prefill > 3
    assert sum(line["new_tokens"] for line in found) == counters.num_prefilled_tokens == 41 + 3 + 1
    assert sum(line["cached_tokens"] for line in found) == counters.num_cached_tokens == 40
    assert [line["left_tokens"] for line in found[:2]] == [25, 9]
    assert found[0]["requests"] == 1
    assert found[0]["queue"] == 1
    assert found[-1] == {
        "step": found[-1]["step"],
        "requests": 1,
        "new_tokens": 1,
        "cached_tokens": 40,
        "left_tokens": 0,
        "running": 0,
        "queue": 0,
        "max_prefill_tokens": world.scheduler.settings.max_prefill_tokens,
        "free_tokens": found[-1]["free_tokens"],
        "new_token_ratio": found[-1]["new_token_ratio"],
    }


@pytest.mark.parametrize("make", [EngineWorld, RecordedWorld])
def test_the_warm_up_is_in_no_line_and_in_no_counter(
    make: type[Any], caplog: pytest.LogCaptureFixture
) -> None:
    log.set_level("debug")
    world = make(settings(num_pages=40, page_size=4, context_length=200))
    world.engine.warm_up(request(-1, [0], max_new_tokens=2, ignore_eos=True))
    world.scheduler = world.engine.scheduler
    assert lines(caplog) == []
    world.send([1, 2, 3], max_new_tokens=2)
    world.run_dry(check=False)
    counters = world.engine.scheduler.counters
    found = lines(caplog)
    assert sum(line["new_tokens"] for line in found) == counters.num_prefilled_tokens == 3


@pytest.mark.parametrize(
    "message",
    [
        lambda level: ConfigureLogging(call=1, log_level=level),
        lambda level: SetInternalState(call=1, server_args={"log_level": level}),
    ],
)
def test_there_are_lines_from_the_moment_that_the_level_is_debug(
    message: Any, caplog: pytest.LogCaptureFixture
) -> None:
    world = world_of("info")
    service = world.engine.services.observers.prefill_log
    assert service not in world.engine.services.core.hooks.attached
    for level, num_lines in (("debug", 1), ("info", 0)):
        world.tell(message(level))
        world.send([1, 2, 3], max_new_tokens=1)
        world.run_dry()
        found = lines(caplog)
        assert len(found) == num_lines
    assert service not in world.engine.services.core.hooks.attached
    assert logging.getLogger("weft.engine").getEffectiveLevel() == logging.INFO

"""Explanations from several engines: a prompt that another engine had computed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.examples import example_of
from weft.client.explained import ON_ANY_ENGINE, OTHER_ENGINE, explained
from weft.client.front_times import FrontTimes
from weft.engine.causes import Cause
from weft.messages.control import (
    CacheCause,
    ExplainRequest,
    ExplainRequestReply,
    Explanation,
    FindPrefix,
    FindPrefixReply,
    PrefixHolder,
    StageTimes,
)


class Engines:
    """A client of engines that answer as they are told."""

    def __init__(
        self, story: Explanation, holders: Sequence[PrefixHolder], num_engines: int = 3
    ) -> None:
        self.engines = [None] * num_engines
        self.asked: list[Any] = []
        self.fronts: dict[int, FrontTimes] = {}
        self._story = story
        self._holders = list(holders)

    async def call(self, request: Any, timeout_s: float = 0.0) -> Any:
        self.asked.append(request)
        if isinstance(request, ExplainRequest):
            return ExplainRequestReply(found=[self._story])
        assert isinstance(request, FindPrefix)
        return FindPrefixReply(found=self._holders)


def story(cause: Cause | None = Cause.FIRST_SEEN, *, missed: int = 0) -> Explanation:
    """A request of engine 1 with 100 prompt tokens, of which 20 were cached."""
    found = None
    if cause is not None:
        found = example_of(CacheCause, cause=cause, missed_tokens=missed)
    one = example_of(
        Explanation,
        rid="r",
        dp_rank=1,
        prompt_tokens=100,
        cached_tokens=20,
        stages=StageTimes(queued_s=0.0, prefill_s=4.0, decode_s=1.0, total_s=5.0),
        cache_cause=found,
        namespace="salt",
        prompt=b"\1\0\0\0" * 100,
        admitted_s=7.0,
    )
    assert isinstance(one, Explanation)
    return one


def holder(rank: int, usable: int, rid: str = "theirs") -> PrefixHolder:
    return PrefixHolder(same_tokens=usable + 1, usable_tokens=usable, rid=rid, dp_rank=rank)


def explain(engines: Engines, viewer: str | None = None) -> Explanation:
    (one,) = asyncio.run(explained(engines, "r", number=4, viewer=viewer))
    return one


def test_a_prompt_that_another_engine_had_computed_was_sent_to_the_wrong_one() -> None:
    engines = Engines(story(), [holder(0, 40), holder(1, 96), holder(2, 60)])
    one = explain(engines, "ann")
    cause = one.cache_cause
    assert cause is not None
    assert cause.cause == OTHER_ENGINE
    assert cause.rid == "theirs"
    assert cause.same_tokens == 61
    assert cause.missed_tokens == 40
    assert cause.missed_s == 2.0
    assert "engine 2 had computed its first 61 tokens for request 'theirs'" in cause.words
    assert "it was sent to engine 1" in cause.words
    assert one.prompt == b""
    assert one.namespace == ""
    asked, looked = engines.asked
    assert (asked.number, asked.viewer, asked.with_prompt) == (4, "ann", True)
    assert looked.namespace == "salt"
    assert looked.viewer == "ann"
    assert looked.before_s == 7.0
    assert len(looked.prompt) == 400


def test_another_engine_that_had_no_more_than_this_one_missed_is_not_named() -> None:
    for usable, is_named in ((50, False), (51, True)):
        engines = Engines(story(Cause.EVICTED, missed=30), [holder(0, usable)])
        cause = explain(engines).cache_cause
        assert cause is not None
        assert (cause.cause == OTHER_ENGINE) is is_named, usable


def test_the_name_of_a_request_of_somebody_else_is_not_told() -> None:
    cause = explain(Engines(story(), [holder(0, 60, rid="")]), "ann").cache_cause
    assert cause is not None
    assert "for another request," in cause.words


@pytest.mark.parametrize("cause", sorted(ON_ANY_ENGINE))
def test_what_would_be_the_same_on_any_engine_is_not_asked_for(cause: str) -> None:
    engines = Engines(story(Cause(cause)), [holder(0, 99)])
    found = explain(engines).cache_cause
    assert found is not None
    assert found.cause == cause
    assert len(engines.asked) == 1


def test_a_request_without_a_cause_stays_without_one() -> None:
    assert explain(Engines(story(None), [holder(0, 99)])).cache_cause is None


def test_one_engine_is_asked_once_and_not_for_the_prompt() -> None:
    engines = Engines(story(), [], num_engines=1)
    explain(engines)
    (asked,) = engines.asked
    assert not asked.with_prompt

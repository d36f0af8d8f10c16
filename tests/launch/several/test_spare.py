"""Processes that are started ahead for the template of the next model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weft.launch.several.spare import SpareTemplate


@pytest.fixture
def spare() -> Iterator[SpareTemplate]:
    spare = SpareTemplate()
    yield spare
    spare.stop()


def test_there_is_at_most_one_and_whoever_takes_it_has_it(spare: SpareTemplate) -> None:
    assert spare.take() is None
    spare.make()
    first = spare._child
    spare.make()
    assert spare._child is first
    taken = spare.take()
    assert taken is first
    assert spare.take() is None
    spare.stop()
    assert taken is not None
    assert taken.is_alive, "it belongs to who took it"
    taken.close()


def test_one_that_has_ended_is_not_given_away(spare: SpareTemplate) -> None:
    spare.make()
    child = spare._child
    assert child is not None
    child.close()
    assert spare.take() is None


def test_after_the_end_of_the_server_none_is_left_and_none_is_started(spare: SpareTemplate) -> None:
    spare.make()
    child = spare._child
    assert child is not None
    spare.stop()
    assert not child.is_alive
    spare.make()
    assert spare.take() is None

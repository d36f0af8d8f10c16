"""The search finds the setting that the machine rewards, and changes nothing that users fixed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.capacity.machines import MACHINE, SETTINGS, USERS, WANTED
from weft.capacity.answer import Question, answer
from weft.capacity.axes.axis import Axis, SettingAxis
from weft.capacity.axes.table import AXES
from weft.capacity.search import Search
from weft.capacity.trial import LoadTrials
from weft.config.options import options_of
from weft.config.scheduling import SchedulingOptions
from weft.engine.control.settings import CHANGEABLE

ROWS = SettingAxis("max_running_requests", lambda machine, settings: (2, 4, 16))
CHUNK = SettingAxis("chunked_prefill_size", lambda machine, settings: (64,))


def searched(*axes: Axis, **changed):
    settings = replace(SETTINGS, **changed)
    return Search(LoadTrials(MACHINE, USERS, WANTED), axes).run(settings)


def test_too_few_rows_are_raised() -> None:
    found = searched(ROWS, max_running_requests=1)
    best = found.candidates[0]
    assert best.changes["max_running_requests"] > 1
    assert best.knee > found.base.knee
    assert best.point.good_per_s > found.base.point.good_per_s
    assert found.is_complete


def test_only_the_axes_that_are_given_change() -> None:
    found = searched(CHUNK, max_running_requests=1)
    for candidate in found.candidates:
        assert candidate.settings.max_running_requests == 1
        assert set(candidate.changes) <= {"chunked_prefill_size"}


def test_settings_that_do_as_well_with_fewer_changes_come_alone() -> None:
    idle = SettingAxis("max_queued_requests", lambda machine, settings: (100, 200))
    found = searched(idle)
    assert [dict(candidate.changes) for candidate in found.candidates] == [{}]


def test_values_that_contradict_other_settings_are_left_out() -> None:
    wrong = SettingAxis("chunked_prefill_size", lambda machine, settings: (1, 64))
    for candidate in searched(wrong).candidates:
        assert candidate.settings.chunked_prefill_size != 1


def test_a_search_that_is_stopped_keeps_what_it_has() -> None:
    search = Search(LoadTrials(MACHINE, USERS, WANTED), [ROWS], stop=lambda: True)
    found = search.run(SETTINGS)
    assert not found.is_complete
    assert [candidate.settings for candidate in found.candidates] == [SETTINGS]


def test_a_number_of_users_that_is_wanted_is_where_settings_are_compared() -> None:
    search = Search(LoadTrials(MACHINE, USERS, WANTED), [CHUNK], wanted_level=40.0)
    found = search.run(SETTINGS)
    assert found.base.point.level >= 40


def test_every_axis_is_an_option_and_knows_whether_it_changes_live() -> None:
    options = {option.name for option in options_of(SchedulingOptions)}
    for axis in AXES:
        assert axis.name in options
        assert axis.is_live == (axis.name in CHANGEABLE)
        for value in axis.values(MACHINE, SETTINGS):
            assert axis.value(axis.changed(SETTINGS, value)) == value
            assert value != axis.value(SETTINGS)


@pytest.fixture(scope="module")
def plan():
    question = Question(USERS, WANTED, [ROWS], num_machines=2, price_per_hour=2.0)
    return answer(MACHINE, question)


def test_the_knee_lies_within_its_range(plan) -> None:
    assert 0 < plan.knee_range.low <= plan.knee <= plan.knee_range.high
    assert plan.knee_point.good_share >= WANTED.share
    levels = [one.point.level for one in plan.curve]
    assert plan.knee in levels
    assert levels == sorted(levels)


def test_a_slower_machine_does_not_do_better(plan) -> None:
    slow = sum(one.slow.good_per_s for one in plan.curve)
    fast = sum(one.fast.good_per_s for one in plan.curve)
    assert slow < fast


def test_less_memory_that_suffices_is_named(plan) -> None:
    assert 0 < plan.kv_tokens <= MACHINE.kv_tokens


def test_the_price_is_that_of_the_tokens_of_all_machines(plan) -> None:
    assert plan.per_million == pytest.approx(2 * 2.0 / 3_600 / plan.fleet[0].output_per_s * 1e6)


def test_two_machines_serve_more_users_than_one(plan) -> None:
    best = plan.fleet[0]
    assert best.machines == 2
    assert best.level > plan.knee
    assert 0 < best.remove_at < best.add_at


def test_the_same_search_finds_the_same(plan) -> None:
    one, other = searched(ROWS), searched(ROWS)
    assert one == other

"""Random arrivals, aborts, failures and tiny memories, with every invariant of the design checked
after every step."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.scheduler.random_worlds import run_random, run_timed
from tests.scheduler.recorded import RecordedWorld
from tests.seeds import chosen, seeds, slow
from weft.cli.main import main
from weft.journal.replay import Replay
from weft.memory.accounting.audit import AccountingError
from weft.memory.allocator import OutOfPages, PageAllocator

# `scripts/soak --schedules` has as many as there is time for.
SCHEDULES = (15, 16, 18, 20, 21, 25, 29, 30, 34)
NUM_TIMED = 4


@pytest.fixture(scope="module")
def memory_checked_every() -> int:
    return 1


@cache
def schedule(seed: int) -> Counter[str]:
    """What the schedule of a seed reaches, in which every invariant has been checked."""
    world = run_random(seed)
    if seed % 4 == 0:
        world.replay()
    stats = world.scheduler.stats()
    finishes = list(world.finished.values())
    reached = Counter(world.talked)
    reached["retractions"] = stats.total_retractions
    reached["evictions"] = stats.total_evicted_tokens
    reached["hits"] = stats.total_cached_tokens
    reached["aborted"] = stats.total_aborted
    reached["not taken"] = sum(finish.status in (400, 503) for finish in finishes)
    reached["late"] = sum(finish.reason == "abort" and finish.status >= 400 for finish in finishes)
    reached["failed"] = len(world.failures)
    silent = [id for id, one in world.sent.items() if one.sampling.max_new_tokens == 0]
    reached["prompt-only rows"] = sum(world.finished[id].reason == "length" for id in silent)
    reached["told in pieces"] = sum(len(pieces) > 1 for pieces in world.given.values())
    return reached


@cache
def timed_schedule(seed: int) -> Counter[str]:
    """The same of one in which time cuts prompts."""
    world = run_timed(seed)
    if seed % 10 == 0:
        world.replay()
    stats = world.scheduler.stats()
    return Counter(
        {
            "cut by time": world.num_cut_by_time,
            "hits": stats.total_cached_tokens,
            "evictions": stats.total_evicted_tokens,
        }
    )


@pytest.mark.parametrize("seed", chosen(SCHEDULES, range(44)))
def test_random_schedule_keeps_every_invariant_and_is_replayed_bit_for_bit(seed: int) -> None:
    schedule(seed)


@pytest.mark.parametrize("seed", seeds(NUM_TIMED, 14))
def test_where_time_cuts_prompts_every_invariant_holds(seed: int) -> None:
    timed_schedule(seed)


@pytest.mark.parametrize("number", seeds(2, 8))
def test_schedules_that_nobody_has_seen_before_keep_every_invariant(
    number: int, fresh_seed: int
) -> None:
    """Others in each run; what fails can be repeated with `--fresh-seed`."""
    seed = fresh_seed * 1_000 + number
    if number % 2:
        run_timed(seed)
    else:
        run_random(seed)


def test_the_timed_schedules_reach_what_they_are_meant_to() -> None:
    reached = sum(map(timed_schedule, range(NUM_TIMED)), Counter[str]())
    assert reached["cut by time"] > 100, reached
    assert reached["evictions"] > 100, reached
    assert reached["hits"] > 1_000, reached


@cache
def put_aside(seed: int) -> RecordedWorld:
    return run_random(seed, 12, switches=seed % 4 == 0, puts_aside=True)


@pytest.mark.parametrize("seed", [300, *slow([306])])
def test_a_journal_may_be_put_aside_at_any_step_and_each_file_is_replayed_alone(seed: int) -> None:
    world = put_aside(seed)
    assert 5 * len(world.records.parts) >= world.scheduler.planner.num_steps - 5
    world.replay(check=True)


@pytest.mark.parametrize("seed", [300, *slow([302])])
def test_a_journal_may_be_put_aside_where_time_cuts_prompts(seed: int) -> None:
    run_timed(seed, 5, puts_aside=True).replay()


def test_a_journal_is_put_aside_in_the_midst_of_what_there_is() -> None:
    met = Counter[str]()
    for seed in (300, 301):
        for records in put_aside(seed).records.files:
            engine = Replay(records).engine
            scheduler = engine.scheduler
            met["requests"] += bool(scheduler.requests)
            met["an open chunk"] += scheduler.prefills.chunked_req is not None
            met["a step in flight"] += bool(engine.core.loop._in_flight)
            met["a queue"] += bool(scheduler.waiting_queue)
            met["a session"] += bool(len(engine.services.sessions.feature))
    assert min(met.values()) > 1, met


def test_a_broken_invariant_leaves_a_journal_that_breaks_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = PageAllocator.free
    with monkeypatch.context() as patch:
        patch.setattr(PageAllocator, "free", lambda self, pages: free(self, pages[pages % 16 != 5]))
        # Nobody mends it in time.
        patch.setattr("weft.engine.kv_audit.KvAuditor.gap", lambda self: (0, 0))
        patch.setattr("weft.engine.kv_audit.AUDIT_INTERVAL_S", float("inf"))
        with pytest.raises((AccountingError, OutOfPages)) as broken:
            run_random(7)
        (note,) = broken.value.__notes__
        assert note.startswith("its journal: weft replay ")
        path = note.split()[-2]
        assert main(["replay", path, "--check"]) == 0
        assert (
            f"then, as recorded: {broken.type.__name__}: {broken.value}" in capsys.readouterr().out
        )
    assert main(["replay", path]) == 1  # without the fault it decides otherwise
    assert "the first difference is at step" in capsys.readouterr().out
    Path(path).unlink()


def test_the_random_schedules_reach_what_they_are_meant_to() -> None:
    reached = sum(map(schedule, SCHEDULES), Counter[str]())
    for what in (
        "retractions",
        "evictions",
        "hits",
        "aborted",
        "not taken",
        "failed",
        "late",
        "prompt-only rows",
        "told in pieces",
    ):
        assert reached[what] >= 3, reached
    for what in (
        "opened",
        "closed",
        "expired",
        "appended",
        "branched",
        "stopped",
        "refused",
        "dropped",
    ):
        assert reached[what] >= 1, reached

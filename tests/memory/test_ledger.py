"""The books of memory in service: faults are named, their pages leave circulation, and the engine
goes on."""

from __future__ import annotations

import numpy as np
import pytest

from tests.scheduler import accounts
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.scenes import settings
from weft.journal.replay import Replay
from weft.memory.accounting.audit import AccountingError, audit, find_faults
from weft.memory.allocator import PageAllocator
from weft.memory.prefix_cache import CacheKey
from weft.memory.radix.cache import RadixCache
from weft.messages.control import AuditKv, AuditReply
from weft.messages.requests import Abort


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_a_quarantined_page_is_never_given_again() -> None:
    allocator = PageAllocator(6, 1)
    taken = allocator.alloc(3)  # 0, 1, 2
    allocator.quarantine(5, is_owned=False)
    allocator.quarantine(1, is_owned=True)
    assert allocator.num_free == 2
    assert allocator.quarantined == {5}
    allocator.free(taken)
    assert allocator.quarantined == {1, 5}
    assert sorted(allocator.alloc(4).tolist()) == [0, 2, 3, 4]


def test_the_allocator_remembers_whom_a_page_was_given_to_last() -> None:
    allocator = PageAllocator(5, 1)
    first = allocator.alloc(3, 7)
    allocator.free(first)
    second = allocator.alloc(2, np.array([8, 9]))
    assert allocator.last_owner[second].tolist() == [8, 9]
    assert sorted(allocator.last_owner.tolist()) == [-1, -1, 7, 8, 9]


def test_a_fault_names_the_page_and_all_its_owners() -> None:
    allocator, cache = PageAllocator(5, 1), RadixCache(1, shares=False)
    allocator.alloc(3)
    faults = find_faults(allocator, cache, {"a": pages(0, 1), "b": pages(1, 3)})
    assert list(map(str, faults)) == [
        "page 1 is owned by a and b",
        "page 2 is owned by nobody",
        "page 3 is owned by the free list and b",
    ]
    with pytest.raises(AccountingError, match="page 1 is owned by a and b"):
        audit(allocator, cache, {"a": pages(0, 1), "b": pages(1, 3)})
    for outside in (-1, 5, 7):
        with pytest.raises(AccountingError, match=r"^b has a page outside of the pool$"):
            audit(allocator, cache, {"a": pages(0, 4), "b": pages(1, outside)})


@pytest.mark.parametrize("name", ["evictable_pages", "pinned_pages", "protected_pages"])
def test_a_cache_that_miscounts_its_pages_is_found(name: str) -> None:
    allocator, cache = PageAllocator(5, 1), RadixCache(1)
    tokens = np.arange(3, dtype=np.int32).tobytes()
    cache.insert(CacheKey("", tokens), allocator.alloc(3))
    audit(allocator, cache, {})
    for wrong in (-1, 1):
        setattr(cache, name, getattr(cache, name) + wrong)
        with pytest.raises(AccountingError, match="counts"):
            audit(allocator, cache, {})
        setattr(cache, name, getattr(cache, name) - wrong)


class Serving(RecordedWorld):
    """A world as in service: faults are mended. Requests of 5 tokens and 20 to generate run in
    it."""

    def __init__(self, **changes: object) -> None:
        super().__init__(settings(**changes), depth=1)
        self.ids = [
            self.send([i, i, i, i, i], max_new_tokens=20, ignore_eos=True) for i in range(3)
        ]
        for _ in range(6):
            self.step()

    def step(self, check: bool = True) -> None:
        super().step(check=False)

    def audited(self) -> AuditReply:
        """The books, looked up now."""
        self.tell(AuditKv(call=1))
        replies = self.engine.step()
        (reply,) = [reply for reply in replies if isinstance(reply, AuditReply)]
        for output in replies:
            if not isinstance(output, AuditReply) and hasattr(output, "finished"):
                self.receive(output)
        return reply

    def end(self) -> None:
        """Everything ends, the books are in order, and more is served."""
        self.run_dry()
        assert self.audited().faults == []
        self.send([9, 9], max_new_tokens=5)
        self.run_dry()
        assert not self.scheduler.requests
        accounts.audit(self.scheduler)
        replay = Replay(self.records)
        replay.run()


def test_a_page_that_is_lost_is_found_in_the_same_step_and_quarantined() -> None:
    world = Serving()
    lost = int(world.scheduler.kv.allocator.alloc(1)[0])
    world.step()
    stats = world.scheduler.stats()
    assert (stats.total_faults, stats.kv_quarantined) == (1, 1)
    assert world.scheduler.kv.allocator.quarantined == {lost}
    assert world.audited().faults == []
    world.end()
    assert [world.finished[id].reason for id in world.ids] == ["length"] * 3
    world.check_outputs()


def test_the_sum_tells_what_is_lost_and_what_is_there_twice() -> None:
    kv = Serving().scheduler.kv
    assert kv.accounts.imbalance == 0
    lost = kv.allocator.alloc(2)
    assert kv.accounts.imbalance == -2
    kv.allocator.free(lost)
    kv.allocator.free(lost[:1])
    assert kv.accounts.imbalance == 1


def test_pages_that_a_row_has_forgotten_are_missed_when_it_is_given_up_not_when_the_engine_is_idle() -> (
    None
):
    world = Serving(prefix_cache=False)
    first = world.request(0)
    world.scheduler.kv.columns.kv_len[first.row] -= 4  # as if less had been computed
    world.abort(Abort(ids=(0,)))
    world.step()
    stats = world.scheduler.stats()
    assert (stats.total_faults, stats.kv_quarantined) == (4, 4)
    assert world.scheduler.requests, "it is not idle"


def test_a_page_that_is_freed_while_somebody_has_it_is_given_to_nobody_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = Serving()
    held = world.scheduler.kv.accounts.owned_pages(world.request(1))[-1:]
    allocator = world.scheduler.kv.allocator
    allocator.free(held)
    free = allocator._free[: allocator.num_free]
    free[:] = np.roll(free, 1)  # it is not the next to be given
    world.step()
    (record,) = [record for record in caplog.records if record.getMessage() == "broken_books"]
    fault = record.fields["fault"]  # type: ignore[attr-defined]
    assert f"page {held[0]} is owned by the free list and r1 (request 1); last given to r1" in fault
    assert "first token" in fault
    assert int(held[0]) not in world.scheduler.kv.allocator.free_pages()
    world.end()
    world.scheduler.flush_cache()
    assert int(held[0]) in allocator.quarantined
    world.check_outputs()


def test_requests_that_were_given_the_same_page_end_and_others_are_computed_anew() -> None:
    world = Serving()
    columns, kv = world.scheduler.kv.columns, world.scheduler.kv
    first, second = world.request(0), world.request(1)
    mine = int(kv.accounts.owned_pages(first)[-1])
    at = int(columns.seq_len[second.row]) - 2
    kv.rows.pages[second.row, at] = mine  # and so the page that was there is nobody's
    reply = world.audited()
    assert len(reply.faults) == 2
    assert "r0 (request 0) and r1 (request 1)" in " ".join(reply.faults)
    world.end()
    assert [world.finished[id].status for id in world.ids] == [500, 500, 200]
    assert world.scheduler.stats().kv_quarantined == 2
    expected = {id: world.sent[id] for id in world.ids[2:]}
    world.sent = {**expected, 3: world.sent[3]}
    world.check_outputs()


def test_a_row_that_is_lost_is_reported_once() -> None:
    world = Serving(max_running_requests=8)
    world.scheduler.kv.rows.alloc()
    for _ in range(5):
        world.step()
    assert world.scheduler.stats().total_faults == 1
    assert world.audited().faults == []


def test_what_fits_no_more_after_a_loss_is_refused_or_ended() -> None:
    world = Serving(num_pages=60, context_length=60)
    long = world.send(list(range(100, 140)), max_new_tokens=18, ignore_eos=True)
    kv = world.scheduler.kv
    kv.allocator.alloc(8)
    world.step()
    assert world.scheduler.limits.max_len == 52
    world.run_dry()
    assert world.finished[long].completion_tokens == 12
    refused = world.send(list(range(100, 140)), max_new_tokens=18)
    world.step()
    assert world.finished[refused].status == 400


def test_an_idle_engine_is_audited_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Serving()
    world.run_dry()
    held = []
    monkeypatch.setattr("weft.scheduler.accounts.find_faults", lambda *args: held.append(1) or [])
    for _ in range(20):
        world.step()
    assert 3 <= len(held) <= 4  # every 5 s

"""What a store has of sequences of models whose layers keep a state or have windows: where they can
be resumed, and the memory that this takes. Pages have 2 tokens, blocks 4."""

from __future__ import annotations

import random

import numpy as np
import pytest

from weft.config.sight import Sight
from weft.memory.accounting.pins import Pins
from weft.memory.allocator import NOBODY
from weft.memory.prefix_cache import CacheKey
from weft.memory.radix.cache import RadixCache
from weft.memory.radix.tree import Node
from weft.memory.states.group import NO_SLOT, StateGroup, WantedCopy
from weft.memory.tiers.resume_states import NoResumeStates, StateResumeStates, WindowResumeStates
from weft.memory.window.group import WindowGroup
from weft.memory.window.tails import Tail

PAGE_SIZE = 2
BLOCK_LEN = 4


def key_of(num_tokens: int) -> CacheKey:
    """The beginning of the one sequence that there is."""
    return CacheKey("", np.arange(num_tokens, dtype=np.int32).tobytes())


def cached(cache: RadixCache, num_tokens: int) -> Node:
    """Let so many tokens be cached. Returns their node."""
    pages = np.arange(num_tokens // PAGE_SIZE, dtype=np.int32)
    handle = cache.insert(key_of(num_tokens), pages).handle
    assert handle is not None
    return handle


class States:
    """A cache with snapshots of states in `num_slots` slots."""

    def __init__(self, num_slots: int = 8) -> None:
        self.cache = RadixCache(PAGE_SIZE)
        self.group = StateGroup(num_slots=num_slots, num_rows=4, pins=Pins(self.cache))
        self.cache.tree.listeners.append(self.group.snapshots)
        self.resume_states = StateResumeStates(self.group)

    def put(self, num_tokens: int) -> Node:
        """A snapshot behind so many tokens."""
        node = cached(self.cache, num_tokens)
        self.group.snapshots.put(node, int(self.group.allocator.alloc(1, NOBODY)[0]))
        return node

    def resumable_lengths(self, num_tokens: int) -> list[int]:
        return self.resume_states.resumable_lengths(self.cache, key_of(num_tokens), BLOCK_LEN)


def test_without_such_layers_the_last_whole_block_is_a_resume_state() -> None:
    cache = RadixCache(PAGE_SIZE)
    assert NoResumeStates().resumable_lengths(cache, key_of(8), BLOCK_LEN) == []
    cached(cache, 10)
    assert NoResumeStates().resumable_lengths(cache, key_of(20), BLOCK_LEN) == [8]
    assert NoResumeStates().resumable_lengths(cache, key_of(2), BLOCK_LEN) == []


def test_snapshots_behind_whole_blocks_are_stored_the_shortest_first() -> None:
    states = States()
    states.put(4)
    states.put(6)  # in the midst of a block
    states.put(8)
    assert len(states.group.snapshots.spare) == 2  # nothing parts behind the first ones
    assert states.resumable_lengths(8) == [4, 8]
    assert states.resumable_lengths(100) == [4, 8]


def test_a_snapshot_behind_more_than_is_asked_for_is_none_of_it() -> None:
    states = States()
    states.put(4)
    states.put(12)
    assert states.resumable_lengths(10) == [4]


def test_a_sequence_is_resumed_behind_its_last_snapshot() -> None:
    states = States()
    states.put(4)
    cached(states.cache, 10)
    assert states.resume_states.resumable(states.cache.match(key_of(10))) == 4


@pytest.mark.parametrize(("num_slots", "most"), [(3, 1), (8, 2), (12, 3)])
def test_a_fourth_of_the_slots_is_read_into_or_one(num_slots: int, most: int) -> None:
    states = States(num_slots)
    taken = [states.resume_states.reserve(8, 100.0) for _ in range(most)]
    assert all(one is not None for one in taken)
    assert states.resume_states.reserve(8, 100.0) is None
    assert taken[0] is not None
    states.resume_states.memory.give_back(taken[0])
    assert states.resume_states.reserve(8, 100.0) is not None


def test_a_snapshot_that_is_being_written_stays() -> None:
    states = States(num_slots=2)
    node = states.put(4)
    other = states.put(8)
    resumable_lengths = states.resume_states.hold(node)
    assert resumable_lengths.tolist() == [states.group.snapshots.slot_of(node)]
    assert states.group.snapshots.evict()
    assert not states.group.snapshots.evict()
    assert other not in states.group.snapshots.ends
    states.resume_states.let_go(node, resumable_lengths)
    assert states.group.snapshots.evict()


WINDOW = Sight(3)


class Windows:
    """A cache with the tails of what tokens see, of which a store has blocks."""

    def __init__(
        self, sight: Sight = WINDOW, num_pages: int = 16, block_len: int = BLOCK_LEN
    ) -> None:
        self.cache = RadixCache(PAGE_SIZE)
        self.group = WindowGroup(
            sight=sight,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            shape=(2, 64),
            pins=Pins(self.cache),
        )
        self.cache.tree.listeners.append(self.group.tails)
        self.resume_states = WindowResumeStates(self.group, block_len)
        self.block_len = block_len

    def leave(self, num_tokens: int, num_pages: int) -> Node:
        """A row has ended behind so many tokens, and left this many pages of its window."""
        node = cached(self.cache, num_tokens)
        pages = self.group.pool.alloc(num_pages, NOBODY)
        self.group.tails.leave(node, Tail(pages, num_tokens // PAGE_SIZE), 0)
        self.group.pool.give_back(pages)
        return node

    def resumable_lengths(self, num_tokens: int) -> list[int]:
        return self.resume_states.resumable_lengths(self.cache, key_of(num_tokens), self.block_len)


def test_a_window_is_stored_before_the_last_whole_block() -> None:
    windows = Windows()
    windows.leave(10, 5)
    assert windows.resumable_lengths(10) == [8]
    assert windows.resumable_lengths(7) == [4]
    cached(windows.cache, 14)
    assert windows.resume_states.resumable(windows.cache.match(key_of(14))) == 10


def test_a_chunk_is_stored_from_its_start_on() -> None:
    windows = Windows(Sight(6, chunked=True))
    tails = windows.group.tails
    num_pages = [tails.num_pages_to_resume(num) for num in range(1, 8)]
    assert num_pages == [1, 2, 1, 1, 2, 1, 1]  # a page at least, also where a chunk begins
    node = windows.leave(10, 2)
    assert windows.resumable_lengths(10) == [8]
    assert len(tails.window_before(node)) == 2
    windows.leave(12, 1)
    assert windows.resume_states.resumable(windows.cache.match(key_of(12))) == 12


def test_a_block_that_ends_where_a_node_begins_counts_once() -> None:
    windows = Windows()
    windows.leave(4, 2)
    windows.leave(6, 3)
    assert windows.resumable_lengths(6) == [4]
    windows.leave(8, 4)
    assert windows.resumable_lengths(8) == [4, 8]


def test_what_is_kept_behind_a_block_reaches_back_to_its_window() -> None:
    windows = Windows(block_len=16)
    windows.leave(30, 10)
    windows.group.tails.evict(1)  # what a row has left beyond that
    assert windows.group.pool.evictable_pages == 1 + 16 // PAGE_SIZE
    assert windows.resumable_lengths(30) == [16]


def test_a_window_is_read_where_running_requests_leave_room() -> None:
    windows = Windows(Sight(5))
    assert windows.resume_states.reserve(8, 3.9) is None
    taken = windows.resume_states.reserve(8, 4.0)
    assert taken is not None
    assert len(taken) == 2
    windows.resume_states.memory.give_back(taken)
    assert windows.group.pool.imbalance == 0


def test_for_a_window_that_is_read_others_are_given_up_but_not_those_of_rows() -> None:
    windows = Windows(num_pages=4)
    windows.leave(8, 4)
    taken = windows.resume_states.reserve(8, 100.0)
    assert taken is not None
    windows.group.tails.evict(100)
    held = windows.group.pool.alloc(windows.group.pool.allocator.num_free, NOBODY)
    assert windows.resume_states.reserve(8, 100.0) is None
    windows.group.pool.give_back(held)
    assert windows.resume_states.reserve(8, 100.0) is not None


def test_a_window_that_has_come_is_the_caches_alone() -> None:
    windows = Windows()
    taken = windows.resume_states.reserve(8, 100.0)
    assert taken is not None
    node = cached(windows.cache, 8)
    windows.resume_states.arrived(node, 8, taken)
    pool = windows.group.pool
    assert (pool.num_owned, pool.evictable_pages) == (0, len(taken))
    assert windows.resume_states.resumable(windows.cache.match(key_of(8))) == 8


def test_a_window_that_is_being_written_stays() -> None:
    windows = Windows()
    node = windows.leave(8, 4)
    pool = windows.group.pool
    held = windows.resume_states.hold(node)
    assert pool.num_owned == len(held) == 1
    windows.group.tails.evict(100)
    assert held[0] not in pool.allocator.free_pages()
    windows.resume_states.let_go(node, held)
    assert pool.num_owned == 0
    assert pool.imbalance == 0


@pytest.mark.pairs
@pytest.mark.parametrize("num_rows", range(4))
@pytest.mark.parametrize("num_snapshots", range(4))
@pytest.mark.parametrize("num_slots", range(1, 9))
def test_states_take_all_slots_that_rows_do_not_need_but_one(
    num_slots: int, num_snapshots: int, num_rows: int
) -> None:
    """Rows have some slots, snapshots some others; the last one is for a row that begins."""
    if num_rows + num_snapshots > num_slots:
        return
    states = States(num_slots)
    group = states.group
    for row in range(num_rows):
        group.begin(row, None, row)
    for number in range(num_snapshots):
        states.put(2 * number + 2)
    lent = []
    while (slots := group.lend()) is not None:
        lent += slots.tolist()
    assert len(set(lent)) == len(lent) == group.num_lent
    assert len(lent) == max(num_slots - num_rows - 1, 0)
    if num_rows < num_slots:
        group.begin(3, None, 3)
        assert group.slots[3] not in lent


@pytest.mark.parametrize("seed", range(20))
def test_a_new_copy_of_a_row_takes_the_slot_of_its_oldest_from_before_the_step(seed: int) -> None:
    """Against a plain twin: the lengths of the copies of each row, the oldest first."""
    rng = random.Random(f"copies {seed}")
    group = States(40).group
    lens = [rng.randrange(1, 30) for _ in range(4)]
    twin: list[list[int]] = [[] for _ in range(4)]
    for row in range(4):
        group.begin(row, None, row)
    for _ in range(60):
        rows = rng.sample(range(4), rng.randrange(1, 5))
        starts = [lens[row] for row in rows]
        wanted = []
        for row_index, row in enumerate(rows):
            length = rng.randrange(1, 5)
            left = [kept for kept in range(1, length + 1) if rng.random() < 0.4]
            wanted += [WantedCopy(row_index, lens[row] + kept, row) for kept in left]
            for kept in left:
                if twin[row] and twin[row][0] <= lens[row]:
                    twin[row].pop(0)
                twin[row].append(lens[row] + kept)
            lens[row] += length
        moves = group.plan(np.array(rows, np.int32), np.array(starts, np.int32), wanted)
        assert moves.kept_rows.tolist() == [one.row_index for one in wanted]
        ends = [starts[one.row_index] for one in wanted] + moves.kept_lens
        assert ends.tolist() == [one.length for one in wanted]
        assert [[copy.length for copy in group._kept.get(row, [])] for row in range(4)] == twin
        slots = [copy.slot for copies in group._kept.values() for copy in copies]
        assert len(set(slots)) == len(slots) == group.num_kept
        assert not set(slots) & set(group.slots.tolist())
        assert set(moves.kept_slots.tolist()) <= set(slots)
        assert group.imbalance == 0


@pytest.mark.parametrize("seed", range(10))
def test_after_a_reset_no_slot_of_states_has_an_owner(seed: int) -> None:
    rng = random.Random(f"reset {seed}")
    states = States(12)
    group = states.group
    ends = [states.put(2 * number + 2) for number in range(rng.randrange(6))]
    behind = rng.choice(ends) if ends else None
    if behind is not None:
        group.snapshots.hold(behind)
    group.begin(0, behind, 0)
    start = np.array([3], dtype=np.int32)
    if rng.random() < 0.5:
        group.plan(np.array([0], dtype=np.int32), start, [WantedCopy(0, 4, 0)])
    group.lend()
    assert group.imbalance == 0
    group.reset()
    assert group.imbalance == 0
    assert (group.num_rows, group.num_kept, group.num_lent, len(group.snapshots)) == (0, 0, 0, 0)
    assert group.available == group.allocator.num_free == 12
    assert not any(len(slots) for slots in group.owned_by({"r": 0}).values())
    assert not group.snapshots.evict()
    assert group.snapshots.deepest(behind, 20) == (None, 0)
    for row in range(4):
        group.begin(row, None, row)
    moves = group.plan(np.arange(4, dtype=np.int32), np.repeat(start, 4), [])
    assert moves.reads.tolist() == [NO_SLOT] * 4
    assert group.imbalance == 0

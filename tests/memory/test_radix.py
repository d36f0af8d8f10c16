"""The radix tree against a naive twin that keeps every page of every sequence in a dict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.memory.allocator import OutOfPages
from weft.memory.prefix_cache import CacheKey
from weft.memory.radix.cache import RadixCache
from weft.memory.radix.tree import key_of, pages_of, path_up


def pack(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


def key(*tokens: int) -> CacheKey:
    return CacheKey("", pack(list(tokens)))


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_a_sequence_is_found_in_whole_pages() -> None:
    cache = RadixCache(page_size=4)
    cache.insert(CacheKey("", pack([1, 2, 3, 4, 5, 6, 7, 8, 9])), pages(10, 11))
    found = cache.match(CacheKey("", pack([1, 2, 3, 4, 5, 6, 7, 99])))
    assert found.length == 4
    assert found.pages.tolist() == [10]
    assert cache.match(CacheKey("", pack([1, 2, 3, 4, 5, 6, 7, 8, 9]))).pages.tolist() == [10, 11]


def test_namespaces_never_share() -> None:
    cache = RadixCache(page_size=1)
    cache.insert(CacheKey("a", pack([1, 2, 3])), pages(0, 1, 2))
    assert cache.match(CacheKey("b", pack([1, 2, 3]))).length == 0
    assert cache.match(CacheKey("a", pack([1, 2, 3]))).length == 3


def test_namespaces_that_cache_nothing_leave_nothing_behind() -> None:
    cache = RadixCache(page_size=4)
    for i in range(100_000):
        namespace = f"salt {i}"
        assert cache.match(CacheKey(namespace, pack([1, 2, 3, 4, 5]))).length == 0
        handle = cache.insert(CacheKey(namespace, pack([1, 2, 3])), pages()).handle
        cache.lock(handle)
        cache.unlock(handle)
    assert len(cache.tree.roots) == 0
    cache.insert(CacheKey("salt 7", pack([1, 2, 3, 4])), pages(0))
    assert [*cache.tree.roots] == ["salt 7"]
    assert cache.match(CacheKey("salt 7", pack([1, 2, 3, 4, 5]))).length == 4
    cache.evict(1)
    assert len(cache.tree.roots) == 0


def test_insert_says_what_was_there_before() -> None:
    cache = RadixCache(page_size=1)
    cache.insert(CacheKey("", pack([1, 2, 3])), pages(0, 1, 2))
    inserted = cache.insert(CacheKey("", pack([1, 2, 8, 9])), pages(5, 6, 7, 8))
    assert inserted.present == 2
    assert inserted.length == 4
    assert pages_of(inserted.handle).tolist() == [0, 1, 7, 8]


def test_eviction_takes_the_least_recently_used_from_their_ends() -> None:
    cache = RadixCache(page_size=1)
    cache.insert(CacheKey("", pack([1, 2, 3])), pages(0, 1, 2))
    cache.insert(CacheKey("", pack([5, 6, 7])), pages(5, 6, 7))
    cache.match(CacheKey("", pack([1, 2, 3])))
    assert cache.evict(2).tolist() == [6, 7]
    assert cache.match(CacheKey("", pack([5, 6, 7]))).length == 1
    assert cache.evict(1).tolist() == [2]


def test_what_is_cool_goes_before_all_that_was_used_earlier() -> None:
    cache = RadixCache(1)
    cache.insert(key(1, 2, 3), pages(0, 1, 2))
    cache.insert(key(1, 5, 6, 7), pages(9, 3, 4, 5))
    cache.insert(key(8, 9), pages(6, 7))
    cache.cool(cache.match(key(1, 5, 6, 7)).handle)
    assert cache.evict(1).tolist() == [5]
    assert cache.evict(3).tolist() == [3, 4, 2]  # its beginning belongs to others, too
    # Used since, it is as any other.
    cache.cool(cache.match(key(8, 9)).handle)
    cache.match(key(8, 9))
    assert cache.evict(1).tolist() == [1]
    # A lock counts more.
    last = cache.match(key(8, 9)).handle
    cache.cool(last)
    cache.lock(last)
    assert cache.evict(1).tolist() == [0]
    cache.unlock(last)
    cache.check()


def test_what_is_left_of_evicted_cool_sequences_does_not_grow() -> None:
    cache = RadixCache(1)
    cache.insert(key(0), pages(0))
    for number in range(1, 5_000):
        cache.insert(key(number), pages(number))
        cache.cool(cache.match(key(number)).handle)
        assert cache.evict(1).tolist() == [number]
    assert len(cache.order) < 1_100
    assert cache.evict(1).tolist() == [0]
    cache.check()


def test_a_cool_leaf_that_was_evicted_may_be_as_old_as_its_parent() -> None:
    cache = RadixCache(1)
    cache.insert(key(1, 2, 3, 4), pages(0, 1, 2, 3))
    cache.insert(key(1, 2, 3, 9), pages(0, 1, 2, 5))
    cache.insert(key(8), pages(6))
    leaf = cache.match(key(1, 2, 3, 9)).handle
    assert cache.evict(2).tolist() == [3, 6]
    cache.cool(leaf)
    assert cache.evict(1).tolist() == [5]
    cache.check()
    assert cache.evict(3).tolist() == [0, 1, 2]
    cache.check()


def test_a_locked_path_is_never_evicted() -> None:
    cache = RadixCache(page_size=1)
    handle = cache.insert(CacheKey("", pack([1, 2, 3])), pages(0, 1, 2)).handle
    cache.insert(CacheKey("", pack([1, 2, 4])), pages(0, 1, 3))
    cache.lock(handle)
    assert cache.evictable_pages == 1
    with pytest.raises(OutOfPages):
        cache.evict(2)
    assert cache.evictable_pages == 1
    assert cache.evict(1).tolist() == [3]
    cache.unlock(handle)
    assert sorted(cache.evict(3).tolist()) == [0, 1, 2]
    assert list(cache.tree.nodes()) == []


def test_a_lock_survives_the_split_of_its_node() -> None:
    cache = RadixCache(page_size=1)
    handle = cache.insert(CacheKey("", pack([1, 2, 3, 4])), pages(0, 1, 2, 3)).handle
    cache.lock(handle)
    cache.match(CacheKey("", pack([1, 2])))
    cache.check()
    assert cache.protected_pages == 4
    cache.unlock(handle)
    cache.check()
    assert cache.evictable_pages == 4


def test_peek_finds_what_match_finds_and_changes_nothing() -> None:
    cache = RadixCache(page_size=2)
    cache.insert(CacheKey("", pack([1, 2, 3, 4, 5, 6])), pages(0, 1, 2))
    before = len(list(cache.tree.nodes()))
    assert cache.peek(CacheKey("", pack([1, 2, 3, 4, 9, 9]))) == 4
    assert cache.peek(CacheKey("other", pack([1, 2]))) == 0
    assert len(list(cache.tree.nodes())) == before


def test_a_node_counts_the_requests_that_have_begun_with_it() -> None:
    cache = RadixCache(page_size=1)
    whole = CacheKey("", pack([1, 2, 3, 4]))
    cache.insert(whole, pages(0, 1, 2, 3))
    cache.count_hit(cache.match(whole).handle)
    cache.count_hit(cache.match(CacheKey("", pack([1, 2, 9]))).handle)
    assert [(node.key, node.hits) for node in cache.tree.nodes()] == [
        (pack([1, 2]), 2),
        (pack([3, 4]), 1),
    ]
    end = cache.match(whole).handle
    assert key_of(end) == whole
    assert [*path_up(end)] == [*cache.tree.nodes()][::-1]


def test_the_cache_that_holds_nothing_leaves_every_page_to_its_owner() -> None:
    cache = RadixCache(1, shares=False)
    inserted = cache.insert(CacheKey("", pack([1, 2])), pages(0, 1))
    assert (inserted.length, inserted.present) == (0, 0)
    assert cache.match(CacheKey("", pack([1, 2]))).length == 0
    with pytest.raises(OutOfPages):
        cache.evict(1)


Path = tuple[str, tuple[int, ...]]  # namespace and tokens


def is_within(one: Path, paths: list[Path]) -> bool:
    """Whether one of these begins with it."""
    namespace, tokens = one
    return any(space == namespace and path[: len(tokens)] == tokens for space, path in paths)


class TreeAgainstDict(RuleBasedStateMachine):
    """The twin maps (namespace, prefix of whole pages) to the page that holds its last page of
    tokens."""

    @initialize(page_size=st.sampled_from([1, 2, 3]))
    def start(self, page_size: int) -> None:
        self.cache = RadixCache(page_size)
        self.page_size = page_size
        self.twin: dict[tuple[str, tuple[int, ...]], int] = {}
        self.next_page = 0
        self.locks: list[tuple[object, str, tuple[int, ...]]] = []
        self.pins: list[tuple[object, str, tuple[int, ...]]] = []

    tokens = st.lists(st.integers(0, 2), max_size=12)
    namespaces = st.sampled_from(["", "salt"])

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [tuple(tokens[:end]) for end in ends]

    def cached(self, namespace: str, tokens: list[int]) -> list[int]:
        found = []
        for prefix in self.prefixes(tokens):
            if (namespace, prefix) not in self.twin:
                break
            found.append(self.twin[namespace, prefix])
        return found

    @rule(namespace=namespaces, tokens=tokens)
    def match(self, namespace: str, tokens: list[int]) -> None:
        expected = self.cached(namespace, tokens)
        assert self.cache.peek(CacheKey(namespace, pack(tokens))) == len(expected) * self.page_size
        found = self.cache.match(CacheKey(namespace, pack(tokens)))
        assert found.pages.tolist() == expected
        assert found.length == len(expected) * self.page_size

    @rule(namespace=namespaces, tokens=tokens)
    def insert(self, namespace: str, tokens: list[int]) -> None:
        prefixes = self.prefixes(tokens)
        present = len(self.cached(namespace, tokens))
        fresh = list(range(self.next_page, self.next_page + len(prefixes)))
        self.next_page += len(prefixes)
        inserted = self.cache.insert(CacheKey(namespace, pack(tokens)), pages(*fresh))
        assert inserted.present == present * self.page_size
        assert inserted.length == len(prefixes) * self.page_size
        for prefix, page in list(zip(prefixes, fresh, strict=True))[present:]:
            self.twin[namespace, prefix] = page

    @rule(namespace=namespaces, tokens=tokens)
    def lock(self, namespace: str, tokens: list[int]) -> None:
        found = self.cache.match(CacheKey(namespace, pack(tokens)))
        self.cache.lock(found.handle)
        self.locks.append((found.handle, namespace, tuple(tokens[: found.length])))

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        handle, _, _ = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        self.cache.unlock(handle)

    @rule(namespace=namespaces, tokens=tokens)
    def pin(self, namespace: str, tokens: list[int]) -> None:
        found = self.cache.match(CacheKey(namespace, pack(tokens)))
        self.cache.pin(found.handle)
        self.pins.append((found.handle, namespace, tuple(tokens[: found.length])))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        handle, _, _ = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.cache.unpin(handle)

    @rule(namespace=namespaces, tokens=tokens)
    def cool(self, namespace: str, tokens: list[int]) -> None:
        self.cache.cool(self.cache.match(CacheKey(namespace, pack(tokens))).handle)

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages: int) -> None:
        if num_pages > self.cache.evictable_pages:
            with pytest.raises(OutOfPages):
                self.cache.evict(num_pages)
            return
        gone = self.cache.evict(num_pages).tolist()
        assert len(gone) == num_pages
        owner = {page: key for key, page in self.twin.items()}
        for page in gone:
            del self.twin[owner[page]]

    @rule(namespace=namespaces, tokens=tokens)
    def forget(self, namespace: str, tokens: list[int]) -> None:
        found = self.cache.match(CacheKey(namespace, pack(tokens)))
        ends = self.prefixes(tokens[: found.length])
        used = [(space, path) for _, space, path in self.locks + self.pins]
        others = used + [key for key in self.twin if key not in [(namespace, end) for end in ends]]
        expected = []
        for end in reversed(ends):
            if any(space == namespace and path[: len(end)] == end for space, path in others):
                break
            expected.append(self.twin.pop((namespace, end)))
        assert sorted(self.cache.forget(found.handle).tolist()) == sorted(expected)

    @rule(namespace=namespaces, tokens=tokens)
    def forget_prefix(self, namespace: str, tokens: list[int]) -> None:
        ends = self.prefixes(tokens)
        used = [(space, path) for _, space, path in self.locks + self.pins]
        expected = []
        if ends and (namespace, ends[-1]) in self.twin:
            begin = (namespace, ends[-1])
            behind = [key for key in self.twin if is_within(begin, [key])]
            expected += [self.twin.pop(key) for key in behind if not is_within(key, used)]
        for end in reversed(ends):
            if (namespace, end) not in self.twin:
                continue
            others = [key for key in self.twin if key != (namespace, end)]
            if is_within((namespace, end), used + others):
                break
            expected.append(self.twin.pop((namespace, end)))
        gone = self.cache.forget_prefix(CacheKey(namespace, pack(tokens)))
        assert sorted(gone.tolist()) == sorted(expected)

    @rule()
    def reset_when_unlocked(self) -> None:
        if not self.locks and not self.pins:
            assert sorted(self.cache.reset().tolist()) == sorted(self.twin.values())
            self.twin.clear()

    @invariant()
    def sums_hold(self) -> None:
        self.cache.check()
        assert sorted(self.cache.tree.owned_pages().tolist()) == sorted(self.twin.values())
        locked, held = (
            {
                (namespace, tokens[:end])
                for _, namespace, tokens in paths
                for end in range(self.page_size, len(tokens) + 1, self.page_size)
            }
            for paths in (self.locks, self.pins)
        )
        assert locked <= set(self.twin), "a locked page was evicted"
        assert held <= set(self.twin), "a held page was evicted"
        # What is protected may be more than what is locked for as long as a node spans both.
        assert self.cache.protected_pages >= len(locked)
        assert self.cache.protected_pages + self.cache.pinned_pages >= len(locked | held)


TreeAgainstDict.TestCase.settings = settings(max_examples=75, stateful_step_count=40, deadline=None)
test_tree_against_dict = TreeAgainstDict.TestCase


class Colliding(bytes):
    """Tokens whose every piece has the same hash."""

    def __getitem__(self, place: slice) -> Colliding:  # type: ignore[override]
        return Colliding(bytes(self)[place])

    def __hash__(self) -> int:
        return 7


def test_equal_hashes_of_other_tokens_are_no_match() -> None:
    cache = RadixCache(page_size=2)
    for first in range(8):
        tokens = Colliding(pack([first, 1, 2, 3]))
        cache.insert(CacheKey("", tokens), pages(2 * first, 2 * first + 1))
    for first in range(8):
        found = cache.match(CacheKey("", Colliding(pack([first, 1, 2, 3]))))
        assert found.pages.tolist() == [2 * first, 2 * first + 1]
    assert cache.match(CacheKey("", Colliding(pack([9, 1, 2, 3])))).length == 0
    assert cache.match(CacheKey("", Colliding(pack([3, 1, 9, 3])))).length == 2

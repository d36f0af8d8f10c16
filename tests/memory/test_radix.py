"""The radix tree against a naive twin that keeps every page of every sequence in a dict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.memory.allocator import OutOfPages
from weft.memory.prefix_cache import CacheKey, NoPrefixCache
from weft.memory.radix import RadixCache


def pack(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


def key(*tokens: int) -> CacheKey:
    return CacheKey("", pack(list(tokens)))


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_a_sequence_is_found_in_whole_pages() -> None:
    tree = RadixCache(page_size=4)
    tree.insert(CacheKey("", pack([1, 2, 3, 4, 5, 6, 7, 8, 9])), pages(10, 11))
    found = tree.match(CacheKey("", pack([1, 2, 3, 4, 5, 6, 7, 99])))
    assert found.length == 4
    assert found.pages.tolist() == [10]
    assert tree.match(CacheKey("", pack([1, 2, 3, 4, 5, 6, 7, 8, 9]))).pages.tolist() == [10, 11]


def test_namespaces_never_share() -> None:
    tree = RadixCache(page_size=1)
    tree.insert(CacheKey("a", pack([1, 2, 3])), pages(0, 1, 2))
    assert tree.match(CacheKey("b", pack([1, 2, 3]))).length == 0
    assert tree.match(CacheKey("a", pack([1, 2, 3]))).length == 3


def test_namespaces_that_cache_nothing_leave_nothing_behind() -> None:
    tree = RadixCache(page_size=4)
    for i in range(100_000):
        namespace = f"salt {i}"
        assert tree.match(CacheKey(namespace, pack([1, 2, 3, 4, 5]))).length == 0
        handle = tree.insert(CacheKey(namespace, pack([1, 2, 3])), pages()).handle
        tree.lock(handle)
        tree.unlock(handle)
    assert len(tree._roots) == 0
    tree.insert(CacheKey("salt 7", pack([1, 2, 3, 4])), pages(0))
    assert [*tree._roots] == ["salt 7"]
    assert tree.match(CacheKey("salt 7", pack([1, 2, 3, 4, 5]))).length == 4
    tree.evict(1)
    assert len(tree._roots) == 0


def test_insert_says_what_was_there_before() -> None:
    tree = RadixCache(page_size=1)
    tree.insert(CacheKey("", pack([1, 2, 3])), pages(0, 1, 2))
    inserted = tree.insert(CacheKey("", pack([1, 2, 8, 9])), pages(5, 6, 7, 8))
    assert inserted.present == 2
    assert inserted.length == 4
    assert tree.pages_of(inserted.handle).tolist() == [0, 1, 7, 8]


def test_eviction_takes_the_least_recently_used_from_their_ends() -> None:
    tree = RadixCache(page_size=1)
    tree.insert(CacheKey("", pack([1, 2, 3])), pages(0, 1, 2))
    tree.insert(CacheKey("", pack([5, 6, 7])), pages(5, 6, 7))
    tree.match(CacheKey("", pack([1, 2, 3])))
    assert tree.evict(2).tolist() == [6, 7]
    assert tree.match(CacheKey("", pack([5, 6, 7]))).length == 1
    assert tree.evict(1).tolist() == [2]


def test_what_is_cool_goes_before_all_that_was_used_earlier() -> None:
    tree = RadixCache(1)
    tree.insert(key(1, 2, 3), pages(0, 1, 2))
    tree.insert(key(1, 5, 6, 7), pages(9, 3, 4, 5))
    tree.insert(key(8, 9), pages(6, 7))
    tree.cool(tree.match(key(1, 5, 6, 7)).handle)
    assert tree.evict(1).tolist() == [5]
    assert tree.evict(3).tolist() == [3, 4, 2]  # its beginning belongs to others, too
    # Used since, it is as any other.
    tree.cool(tree.match(key(8, 9)).handle)
    tree.match(key(8, 9))
    assert tree.evict(1).tolist() == [1]
    # A lock counts more.
    last = tree.match(key(8, 9)).handle
    tree.cool(last)
    tree.lock(last)
    assert tree.evict(1).tolist() == [0]
    tree.unlock(last)
    tree.check()


def test_what_is_left_of_evicted_cool_sequences_does_not_grow() -> None:
    tree = RadixCache(1)
    tree.insert(key(0), pages(0))
    for number in range(1, 5_000):
        tree.insert(key(number), pages(number))
        tree.cool(tree.match(key(number)).handle)
        assert tree.evict(1).tolist() == [number]
    assert len(tree._heap) + len(tree._new_leaves) < 1_100
    assert tree.evict(1).tolist() == [0]
    tree.check()


def test_a_locked_path_is_never_evicted() -> None:
    tree = RadixCache(page_size=1)
    handle = tree.insert(CacheKey("", pack([1, 2, 3])), pages(0, 1, 2)).handle
    tree.insert(CacheKey("", pack([1, 2, 4])), pages(0, 1, 3))
    tree.lock(handle)
    assert tree.evictable_pages == 1
    with pytest.raises(OutOfPages):
        tree.evict(2)
    assert tree.evictable_pages == 1
    assert tree.evict(1).tolist() == [3]
    tree.unlock(handle)
    assert sorted(tree.evict(3).tolist()) == [0, 1, 2]
    assert list(tree.nodes()) == []


def test_a_lock_survives_the_split_of_its_node() -> None:
    tree = RadixCache(page_size=1)
    handle = tree.insert(CacheKey("", pack([1, 2, 3, 4])), pages(0, 1, 2, 3)).handle
    tree.lock(handle)
    tree.match(CacheKey("", pack([1, 2])))
    tree.check()
    assert tree.protected_pages == 4
    tree.unlock(handle)
    tree.check()
    assert tree.evictable_pages == 4


def test_peek_finds_what_match_finds_and_changes_nothing() -> None:
    tree = RadixCache(page_size=2)
    tree.insert(CacheKey("", pack([1, 2, 3, 4, 5, 6])), pages(0, 1, 2))
    before = len(list(tree.nodes()))
    assert tree.peek(CacheKey("", pack([1, 2, 3, 4, 9, 9]))) == 4
    assert tree.peek(CacheKey("other", pack([1, 2]))) == 0
    assert len(list(tree.nodes())) == before


def test_a_node_counts_the_requests_that_have_begun_with_it() -> None:
    tree = RadixCache(page_size=1)
    whole = CacheKey("", pack([1, 2, 3, 4]))
    tree.insert(whole, pages(0, 1, 2, 3))
    tree.count_hit(tree.match(whole).handle)
    tree.count_hit(tree.match(CacheKey("", pack([1, 2, 9]))).handle)
    assert [(node.key, node.hits) for node in tree.nodes()] == [
        (pack([1, 2]), 2),
        (pack([3, 4]), 1),
    ]
    end = tree.match(whole).handle
    assert tree.key_of(end) == whole
    assert [*tree.path_of(end)] == [*tree.nodes()][::-1]


def test_the_cache_that_holds_nothing_leaves_every_page_to_its_owner() -> None:
    cache = NoPrefixCache(page_size=1)
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
        self.tree = RadixCache(page_size)
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
        assert self.tree.peek(CacheKey(namespace, pack(tokens))) == len(expected) * self.page_size
        found = self.tree.match(CacheKey(namespace, pack(tokens)))
        assert found.pages.tolist() == expected
        assert found.length == len(expected) * self.page_size

    @rule(namespace=namespaces, tokens=tokens)
    def insert(self, namespace: str, tokens: list[int]) -> None:
        prefixes = self.prefixes(tokens)
        present = len(self.cached(namespace, tokens))
        fresh = list(range(self.next_page, self.next_page + len(prefixes)))
        self.next_page += len(prefixes)
        inserted = self.tree.insert(CacheKey(namespace, pack(tokens)), pages(*fresh))
        assert inserted.present == present * self.page_size
        assert inserted.length == len(prefixes) * self.page_size
        for prefix, page in list(zip(prefixes, fresh, strict=True))[present:]:
            self.twin[namespace, prefix] = page

    @rule(namespace=namespaces, tokens=tokens)
    def lock(self, namespace: str, tokens: list[int]) -> None:
        found = self.tree.match(CacheKey(namespace, pack(tokens)))
        self.tree.lock(found.handle)
        self.locks.append((found.handle, namespace, tuple(tokens[: found.length])))

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        handle, _, _ = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        self.tree.unlock(handle)

    @rule(namespace=namespaces, tokens=tokens)
    def pin(self, namespace: str, tokens: list[int]) -> None:
        found = self.tree.match(CacheKey(namespace, pack(tokens)))
        self.tree.pin(found.handle)
        self.pins.append((found.handle, namespace, tuple(tokens[: found.length])))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        handle, _, _ = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.tree.unpin(handle)

    @rule(namespace=namespaces, tokens=tokens)
    def cool(self, namespace: str, tokens: list[int]) -> None:
        self.tree.cool(self.tree.match(CacheKey(namespace, pack(tokens))).handle)

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages: int) -> None:
        if num_pages > self.tree.evictable_pages:
            with pytest.raises(OutOfPages):
                self.tree.evict(num_pages)
            return
        gone = self.tree.evict(num_pages).tolist()
        assert len(gone) == num_pages
        owner = {page: key for key, page in self.twin.items()}
        for page in gone:
            del self.twin[owner[page]]

    @rule(namespace=namespaces, tokens=tokens)
    def forget(self, namespace: str, tokens: list[int]) -> None:
        found = self.tree.match(CacheKey(namespace, pack(tokens)))
        ends = self.prefixes(tokens[: found.length])
        used = [(space, path) for _, space, path in self.locks + self.pins]
        others = used + [key for key in self.twin if key not in [(namespace, end) for end in ends]]
        expected = []
        for end in reversed(ends):
            if any(space == namespace and path[: len(end)] == end for space, path in others):
                break
            expected.append(self.twin.pop((namespace, end)))
        assert sorted(self.tree.forget(found.handle).tolist()) == sorted(expected)

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
        gone = self.tree.forget_prefix(CacheKey(namespace, pack(tokens)))
        assert sorted(gone.tolist()) == sorted(expected)

    @rule()
    def reset_when_unlocked(self) -> None:
        if not self.locks and not self.pins:
            assert sorted(self.tree.reset().tolist()) == sorted(self.twin.values())
            self.twin.clear()

    @invariant()
    def sums_hold(self) -> None:
        self.tree.check()
        assert sorted(self.tree.owned_pages().tolist()) == sorted(self.twin.values())
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
        assert self.tree.protected_pages >= len(locked)
        assert self.tree.protected_pages + self.tree.pinned_pages >= len(locked | held)


TreeAgainstDict.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
test_tree_against_dict = TreeAgainstDict.TestCase


class Colliding(bytes):
    """Tokens whose every piece has the same hash."""

    def __getitem__(self, place: slice) -> Colliding:  # type: ignore[override]
        return Colliding(bytes(self)[place])

    def __hash__(self) -> int:
        return 7


def test_equal_hashes_of_other_tokens_are_no_match() -> None:
    tree = RadixCache(page_size=2)
    for first in range(8):
        tokens = Colliding(pack([first, 1, 2, 3]))
        tree.insert(CacheKey("", tokens), pages(2 * first, 2 * first + 1))
    for first in range(8):
        found = tree.match(CacheKey("", Colliding(pack([first, 1, 2, 3]))))
        assert found.pages.tolist() == [2 * first, 2 * first + 1]
    assert tree.match(CacheKey("", Colliding(pack([9, 1, 2, 3])))).length == 0
    assert tree.match(CacheKey("", Colliding(pack([3, 1, 9, 3])))).length == 2

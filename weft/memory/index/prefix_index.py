"""Keeps the cached prefix length of sequences up to date while the cache changes.

An indexed sequence is attached to the node where its cached prefix ends, filed under its next page.
When a node is inserted below, only the sequences whose next page is the first page of the new node
move down; when a node is evicted, its sequences move up. So the cost of a change is proportional to
the number of sequences that it affects.

When thousands of sequences would move down at once, MAX_MOVES of them do (FEW_MOVES if very many
are indexed), and the others with later calls of `move_on`. Until then they keep their old lengths,
which are lower bounds. The index knows numbers and keys, never requests.

    [1 2] ── [3 4]      sequence 1 2 9 9: at node [1 2], next page 9 9
                        sequence 1 2 3 4 5: at node [3 4], no whole page left
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from weft.memory.index.subtree_counts import Anchor, SubtreeCounts, anchor_of
from weft.memory.prefix_cache import TOKEN_BYTES, CacheKey, shared_len
from weft.memory.radix.cache import RadixCache
from weft.memory.radix.tree import Node, path_up

# Moves per insertion or call of `move_on`: each takes about 10 us of a step.
MAX_MOVES = 32
# Limit if there are more than MANY sequences: then a step has more other work and more moves.
FEW_MOVES = 8
MANY = 16_384
# when a node is split, up to this many times the limit of sequences are filed again one by one
NUM_AT_ONCE = 8
NUM_FIRST = 64  # numbers of a bucket that are listed before the rest


class IndexedSequence:
    """The first `end` bytes of a key, and the end of their cached prefix."""

    __slots__ = ("bucket", "end", "key", "length", "next_page", "number")

    def __init__(self, number: int, key: CacheKey, end: int) -> None:
        self.number = number
        self.key = key
        self.end = end
        self.bucket: Bucket | None = None  # bucket of the node where its cached prefix ends
        self.length = 0  # length of the cached prefix in bytes
        self.next_page = b""  # first page of a child that would continue it; empty: no child can


class Bucket:
    """The sequences whose cached prefix ends at one anchor."""

    __slots__ = ("anchor", "by_length", "by_next_page", "highest", "is_sorted", "members")

    def __init__(self, anchor: Anchor) -> None:
        self.anchor = anchor
        self.members: dict[int, IndexedSequence] = {}  # by number
        self.is_sorted = True  # whether `members` is in rising order of numbers
        self.highest = -1  # highest number that was ever in the bucket
        self.by_length: dict[int, dict[int, IndexedSequence]] = {}
        # Sequences whose cached prefix ends at the end of the node, and that have a next page.
        self.by_next_page: dict[bytes, dict[int, IndexedSequence]] = {}

    def add(self, sequence: IndexedSequence) -> None:
        number = sequence.number
        if number > self.highest:
            self.highest = number
        elif number not in self.members:
            self.is_sorted = False
        self.members[number] = sequence
        self.by_length.setdefault(sequence.length, {})[number] = sequence

    def drop(self, sequence: IndexedSequence) -> None:
        number = sequence.number
        del self.members[number]
        alike = self.by_length[sequence.length]
        del alike[number]
        if not alike:
            del self.by_length[sequence.length]

    def numbers(self) -> Iterator[int]:
        """Numbers in rising order. Yielded ones may leave during the iteration; the others stay."""
        if not self.is_sorted:
            self.members = dict(sorted(self.members.items()))
            self.is_sorted = True
        first = list(islice(self.members, NUM_FIRST))
        yield from first
        if len(first) == NUM_FIRST:
            last = first[-1]
            yield from [number for number in list(self.members) if number > last]


class PrefixIndex:
    """A listener of a cache. It calls `moved(number, length)` when the cached prefix of a sequence
    has a new length, in tokens."""

    def __init__(
        self,
        cache: RadixCache,
        moved: Callable[[int, int], None],
        counts: SubtreeCounts | None = None,
    ) -> None:
        assert cache.shares, "nothing changes in a cache that shares nothing"
        self._cache = cache
        self._moved = moved
        self._counts = counts
        self._step = cache.page_size * TOKEN_BYTES
        self._sequences: dict[int, IndexedSequence] = {}
        self._buckets: dict[Anchor, Bucket] = {}
        self._late: deque[int] = deque()  # numbers of sequences that must still move down

    def add(self, number: int, key: CacheKey, end: int) -> int:
        """Index the first `end` bytes of a key. Returns the length of its cached prefix in
        tokens."""
        sequence = IndexedSequence(number, key, end)
        self._sequences[number] = sequence
        handle, length, is_end = self._cache.tree.locate(key, end)
        anchor = key.namespace if handle is None else handle
        self._put(sequence, anchor, length, is_end)
        if self._counts is not None:
            self._counts.change(anchor, 1)
        return length // TOKEN_BYTES

    def remove(self, number: int) -> None:
        sequence = self._sequences.pop(number)
        anchor = self._take_out(sequence)
        if self._counts is not None:
            self._counts.change(anchor, -1)

    def length(self, number: int) -> int:
        """Cached tokens of a sequence."""
        return self._sequences[number].length // TOKEN_BYTES

    def arrivals_at(self, anchor: Anchor) -> Iterator[int]:
        """The numbers of sequences whose cached prefix ends at `anchor`, in rising order. Lazy."""
        bucket = self._buckets.get(anchor)
        if bucket is None:
            return iter(())
        return bucket.numbers()

    def move_on(self) -> None:
        """Move some of the sequences that did not move when their prefix was inserted."""
        for _ in range(min(len(self._late), self._max_moves())):
            # If it was removed or moved since, this has no effect, or moves it to its current end.
            sequence = self._sequences.get(self._late.popleft())
            if sequence is not None:
                self._move(sequence)

    # CacheListener

    def inserted(self, leaf: Node) -> None:
        assert leaf.parent is not None
        above = anchor_of(leaf.parent)
        bucket = self._buckets.get(above)
        if bucket is None:
            return
        key = leaf.key
        step = self._step
        group = bucket.by_next_page.get(key[:step])
        if not group:
            return
        # Sequences of a family share their beginning: most share as much as the one before.
        shared = 0
        prefix = b""
        moving: Iterable[IndexedSequence] = group.values()
        num_moving = len(group)
        max_moves = self._max_moves()
        if num_moving > max_moves:
            numbers = iter(list(group))
            moving = [group[number] for number in islice(numbers, max_moves)]
            num_moving = max_moves
            self._late.extend(numbers)
            for sequence in moving:
                self._take_out(sequence)
        else:
            self._take_out_group(above, key[:step], group)
        for sequence in moving:
            if not self._shares_exactly(sequence, key, prefix):
                last = sequence.end // step * step
                shared = shared_len(sequence.key.tokens, sequence.length, last, key, step)
                prefix = key[:shared]
            length = sequence.length + shared
            self._put(sequence, leaf, length, is_end=shared == len(key))
            self._moved(sequence.number, length // TOKEN_BYTES)
        if self._counts is not None:
            self._counts.put(leaf, above, num_moving)

    def split(self, upper: Node, lower: Node) -> None:
        bucket = self._buckets.get(lower)
        if bucket is not None:
            self._split(bucket, upper, lower)
        if self._counts is not None:
            at_upper = self._buckets.get(upper)
            num_at_upper = 0 if at_upper is None else len(at_upper.members)
            self._counts.split(upper, lower, num_at_upper)

    def trimmed(self, leaf: Node) -> None:
        bucket = self._buckets.get(leaf)
        if bucket is not None:
            self._cut_off(bucket, leaf, _depth(leaf))

    def removed(self, leaf: Node) -> None:
        bucket = self._buckets.get(leaf)
        if bucket is None:
            return
        assert leaf.parent is not None
        above = anchor_of(leaf.parent)
        self._cut_off(bucket, above, _depth(leaf.parent))
        if self._counts is not None:
            self._counts.put(leaf, above, 0)

    def emptied(self) -> None:
        self._buckets.clear()
        self._late.clear()
        if self._counts is not None:
            self._counts.clear()
        for sequence in self._sequences.values():
            self._put(sequence, sequence.key.namespace, 0, is_end=True)
            self._moved(sequence.number, 0)
            if self._counts is not None:
                self._counts.change(sequence.key.namespace, 1)

    # Inside

    def _max_moves(self) -> int:
        return MAX_MOVES if len(self._sequences) <= MANY else FEW_MOVES

    def _move(self, sequence: IndexedSequence) -> None:
        """Move a sequence to the current end of its cached prefix."""
        handle, length, is_end = self._cache.tree.locate(sequence.key, sequence.end)
        anchor = sequence.key.namespace if handle is None else handle
        before_len = sequence.length
        if length == before_len and not (is_end and not sequence.next_page):
            return
        before = self._take_out(sequence)
        self._put(sequence, anchor, length, is_end)
        if length == before_len:
            return
        if self._counts is not None:
            self._counts.change(before, -1)
            self._counts.change(anchor, 1)
        self._moved(sequence.number, length // TOKEN_BYTES)

    def _split(self, bucket: Bucket, upper: Node, lower: Node) -> None:
        """Move the sequences that end above `lower` to the new `upper`."""
        border = _depth(upper)
        above = [alike for length, alike in bucket.by_length.items() if length <= border]
        if sum(map(len, above)) <= NUM_AT_ONCE * self._max_moves():
            for sequence in [one for alike in above for one in alike.values()]:
                self._take_out(sequence)
                is_end = sequence.length == border
                self._put(sequence, upper, sequence.length, is_end)
            return
        # Most sequences belong to `upper`: it takes the bucket over, and the others leave it.
        below = [alike for length, alike in bucket.by_length.items() if length > border]
        self._buckets[upper] = bucket
        del self._buckets[lower]
        bucket.anchor = upper
        for sequence in [one for alike in below for one in alike.values()]:
            is_end = sequence.next_page != b""
            self._take_out(sequence)
            self._put(sequence, lower, sequence.length, is_end)
        # The next page of these sequences is filed later.
        self._late.extend(bucket.by_length.get(border, ()))

    def _cut_off(self, bucket: Bucket, anchor: Anchor, depth: int) -> None:
        """Shorten the cached prefixes in a bucket to `depth`, the end of `anchor`."""
        for sequence in list(bucket.members.values()):
            if sequence.length < depth:
                continue
            self._take_out(sequence)
            has_lost = sequence.length > depth
            self._put(sequence, anchor, depth, is_end=True)
            if has_lost:
                self._moved(sequence.number, depth // TOKEN_BYTES)

    def _shares_exactly(self, sequence: IndexedSequence, key: bytes, prefix: bytes) -> bool:
        """Whether a sequence continues with `prefix`, the beginning of `key`, and not a page
        more."""
        length = len(prefix)
        border = sequence.length + length
        step = self._step
        if not 0 < length < len(key) or border + step > sequence.end:
            return False
        tokens = sequence.key.tokens
        if tokens[border : border + step] == key[length : length + step]:
            return False
        return tokens.startswith(prefix, sequence.length)

    def _put(self, sequence: IndexedSequence, anchor: Anchor, length: int, is_end: bool) -> None:
        sequence.length = length
        bucket = self._buckets.get(anchor)
        if bucket is None:
            bucket = self._buckets[anchor] = Bucket(anchor)
        bucket.add(sequence)
        sequence.bucket = bucket
        if is_end and length + self._step <= sequence.end:
            sequence.next_page = sequence.key.tokens[length : length + self._step]
            bucket.by_next_page.setdefault(sequence.next_page, {})[sequence.number] = sequence
        else:
            sequence.next_page = b""

    def _take_out(self, sequence: IndexedSequence) -> Anchor:
        """Remove a sequence from its bucket. Returns the anchor where it was."""
        bucket = sequence.bucket
        assert bucket is not None
        bucket.drop(sequence)
        if not bucket.members:
            del self._buckets[bucket.anchor]
        elif sequence.next_page:
            group = bucket.by_next_page[sequence.next_page]
            del group[sequence.number]
            if not group:
                del bucket.by_next_page[sequence.next_page]
        return bucket.anchor

    def _take_out_group(
        self, anchor: Anchor, next_page: bytes, group: dict[int, IndexedSequence]
    ) -> None:
        """Remove all sequences at `anchor` whose next page is `next_page`."""
        bucket = self._buckets[anchor]
        del bucket.by_next_page[next_page]
        if len(group) == len(bucket.members):
            del self._buckets[anchor]
            return
        for sequence in group.values():
            bucket.drop(sequence)


def _depth(node: Node) -> int:
    """Bytes from the beginning of a sequence to the end of `node`."""
    depth = 0
    for above in path_up(node):
        depth += len(above.key)
    return depth

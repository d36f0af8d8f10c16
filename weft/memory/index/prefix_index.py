"""Keeps the cached prefix length of sequences true while the cache changes, without looking them up again.

A watched sequence is attached to the node where its cached prefix ends, under the page that it would go on with. When a
node is inserted below, only those whose next page is the new node's first move down; when a node is evicted, those at
it move up. So a change costs as much as there are sequences that it concerns. Knows numbers and tokens, never requests.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.memory.index.subtree_counts import SubtreeCounts
from weft.memory.prefix_cache import TOKEN_BYTES, PrefixCache
from weft.memory.radix import Node, Root, shared_len


class IndexedSequence:
    """A sequence that is watched, `tokens[:end]`, and where its cached prefix ends."""

    __slots__ = ("end", "length", "namespace", "next_page", "node", "number", "tokens")

    def __init__(self, number: int, namespace: str, tokens: bytes, end: int) -> None:
        self.number = number
        self.namespace = namespace
        self.tokens = tokens
        self.end = end
        self.node: Node
        self.length = 0  # of the prefix, in bytes
        self.next_page = b""  # what a child of `node` would begin with; empty if none can go on


class Bucket:
    """The sequences whose cached prefix ends at one node."""

    __slots__ = ("by_next_page", "own")

    def __init__(self) -> None:
        self.own: dict[int, IndexedSequence] = {}  # by number
        self.by_next_page: dict[
            bytes, dict[int, IndexedSequence]
        ] = {}  # those that end at the node's end and go on


class PrefixIndex:
    """`moved(number, length)` is called when the cached prefix of a sequence has got another length, in tokens."""

    def __init__(
        self,
        cache: PrefixCache,
        moved: Callable[[int, int], None],
        weights: SubtreeCounts | None = None,
    ) -> None:
        assert cache.shares, "nothing changes in a cache that shares nothing"
        self._cache = cache
        self._moved = moved
        self._weights = weights
        self._step = cache.page_size * TOKEN_BYTES
        self._watched: dict[int, IndexedSequence] = {}
        self._buckets: dict[Node, Bucket] = {}

    def add(self, number: int, namespace: str, tokens: bytes, end: int) -> int:
        """Index `tokens[:end]` (in bytes) under a number. Returns the length in tokens of its cached prefix."""
        watched = self._watched[number] = IndexedSequence(number, namespace, tokens, end)
        self._put(watched, *self._cache.locate(namespace, tokens, end))
        if self._weights is not None:
            self._weights.change(watched.node, 1)
        return watched.length // TOKEN_BYTES

    def remove(self, number: int) -> None:
        watched = self._watched.pop(number)
        self._take_out(watched)
        if self._weights is not None:
            self._weights.change(watched.node, -1)

    def length(self, number: int) -> int:
        """Tokens of a watched sequence that are cached."""
        return self._watched[number].length // TOKEN_BYTES

    def ending_at(self, node: Node) -> list[int]:
        """The numbers of those whose cached prefix ends at `node`, in rising order."""
        bucket = self._buckets.get(node)
        return sorted(bucket.own) if bucket is not None else []

    # Listener

    def inserted(self, leaf: Node) -> None:
        assert leaf.parent is not None
        bucket = self._buckets.get(leaf.parent)
        group = None if bucket is None else bucket.by_next_page.get(leaf.key[: self._step])
        if not group:
            return
        key, step = leaf.key, self._step
        shared, prefix = 0, b""  # most share as much as the one before
        self._take_out_group(leaf.parent, key[:step], group)
        for watched in group.values():
            if not self._shares_exactly(watched, key, prefix):
                shared = shared_len(
                    watched.tokens, watched.length, watched.end // step * step, key, step
                )
                prefix = key[:shared]
            self._put(watched, leaf, watched.length + shared, is_end=shared == len(key))
            self._moved(watched.number, watched.length // TOKEN_BYTES)
        if self._weights is not None:
            self._weights.put(leaf, len(group))

    def split(self, upper: Node, lower: Node) -> None:
        bucket = self._buckets.get(lower)
        if bucket is not None:
            border = _depth(upper)
            for watched in [watched for watched in bucket.own.values() if watched.length <= border]:
                self._take_out(watched)
                self._put(watched, upper, watched.length, is_end=watched.length == border)
        if self._weights is not None:
            at_upper = self._buckets.get(upper)
            self._weights.split(upper, lower, 0 if at_upper is None else len(at_upper.own))

    def trimmed(self, leaf: Node) -> None:
        bucket = self._buckets.get(leaf)
        if bucket is not None:
            self._cut_off(bucket, leaf, _depth(leaf))

    def removed(self, leaf: Node) -> None:
        bucket = self._buckets.get(leaf)
        if bucket is not None:
            assert leaf.parent is not None
            self._cut_off(bucket, leaf.parent, _depth(leaf.parent))
            if self._weights is not None:
                self._weights.put(leaf, 0)

    def emptied(self) -> None:
        self._buckets.clear()
        if self._weights is not None:
            self._weights.clear()
        for watched in self._watched.values():
            self._put(watched, Root(watched.namespace), 0, is_end=True)
            self._moved(watched.number, 0)
            if self._weights is not None:
                self._weights.change(watched.node, 1)

    # Inside

    def _cut_off(self, bucket: Bucket, node: Node, depth: int) -> None:
        """What a bucket's sequences have beyond `depth`, the end of `node`, is cached no more."""
        for watched in list(bucket.own.values()):
            if watched.length >= depth:
                self._take_out(watched)
                has_lost = watched.length > depth
                self._put(watched, node, depth, is_end=True)
                if has_lost:
                    self._moved(watched.number, depth // TOKEN_BYTES)

    def _shares_exactly(self, watched: IndexedSequence, key: bytes, prefix: bytes) -> bool:
        """Whether a sequence goes on with `prefix`, the beginning of `key`, and not with the page behind it."""
        border, length, step = watched.length + len(prefix), len(prefix), self._step
        if not 0 < length < len(key) or border + step > watched.end:
            return False
        next_page = watched.tokens[border : border + step]
        return next_page != key[length : length + step] and watched.tokens.startswith(
            prefix, watched.length
        )

    def _put(self, watched: IndexedSequence, node: Node, length: int, is_end: bool) -> None:
        watched.node, watched.length = node, length
        bucket = self._buckets.get(node)
        if bucket is None:
            bucket = self._buckets[node] = Bucket()
        bucket.own[watched.number] = watched
        if is_end and length + self._step <= watched.end:
            watched.next_page = watched.tokens[length : length + self._step]
            bucket.by_next_page.setdefault(watched.next_page, {})[watched.number] = watched
        else:
            watched.next_page = b""

    def _take_out(self, watched: IndexedSequence) -> None:
        bucket = self._buckets[watched.node]
        del bucket.own[watched.number]
        if not bucket.own:
            del self._buckets[watched.node]
        elif watched.next_page:
            group = bucket.by_next_page[watched.next_page]
            del group[watched.number]
            if not group:
                del bucket.by_next_page[watched.next_page]

    def _take_out_group(
        self, node: Node, next_page: bytes, group: dict[int, IndexedSequence]
    ) -> None:
        """Take out all at `node` that would go on with `next_page`."""
        bucket = self._buckets[node]
        del bucket.by_next_page[next_page]
        if len(group) == len(bucket.own):
            del self._buckets[node]
        else:
            for number in group:
                del bucket.own[number]


def _depth(node: Node) -> int:
    """Bytes from the beginning of a sequence to the end of `node`."""
    depth, above = 0, node.parent
    while above is not None:
        depth += len(node.key)
        node, above = above, above.parent
    return depth

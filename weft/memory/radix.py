"""A radix tree over token sequences in whole pages: the prefix cache.

Each node holds a piece of sequence as packed bytes (token ids, and the numbers of its pages); its children are keyed by
the bytes of their first page, so that a step down is one dict lookup and one memcmp. Eviction takes leaves in the order
of last use from a heap that lives across calls and is put right lazily: its cost grows with what is evicted, not with
the tree. Source: RadixAttention, arXiv:2312.07104, section 3.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from weft.memory.allocator import IntArray, OutOfPages
from weft.memory.prefix_cache import NO_PAGES, TOKEN_BYTES, Inserted, Listener, Match, Place

PAGE_BYTES = 4  # of a page number in Node.pages
INT32 = np.dtype(
    np.int32
)  # made once: numpy takes longer to look the type up than to wrap a short sequence


class Node:
    """A piece of sequence below `parent`."""

    __slots__ = (
        "children",
        "is_queued",
        "key",
        "locks",
        "pages",
        "parent",
        "pins",
        "serial",
        "used",
    )

    def __init__(
        self, key: bytes, pages: bytes, parent: Node | None, used: int, serial: int
    ) -> None:
        self.key = key  # token ids, int32 each
        self.pages = pages  # page numbers, int32 each
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.used = used  # when it was last used, in calls of the tree
        self.serial = (
            serial  # breaks ties between nodes of one path, so that eviction is deterministic
        )
        self.locks = 0
        self.pins = 0
        self.is_queued = False  # stands in the eviction heap


class Root(Node):
    """The top of one namespace: an empty piece. The tree has it from its first child to its last.

    Who keeps something about a namespace may keep it by its root: all roots that it has had are equal.
    """

    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(b"", b"", None, 0, 0)
        self.namespace = namespace

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Root) and other.namespace == self.namespace

    def __hash__(self) -> int:
        return hash(self.namespace)


class RadixCache:
    shares = True

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.listener: Listener | None = None
        self.evictable_pages = 0
        self.pinned_pages = 0
        self.protected_pages = 0
        self.total_evicted_pages = 0
        self._step = page_size * TOKEN_BYTES  # bytes of one page of a key
        self._clock = 0
        self._serial = 0
        self._roots: dict[str, Root] = {}
        self._heap: list[tuple[int, int, Node]] = []

    # Lookup

    def match(self, namespace: str, tokens: bytes) -> Match:
        root = self._roots.get(namespace)
        if root is None:
            return Match(Root(namespace), 0, NO_PAGES)
        node, length = self._walk(root, tokens)
        return Match(node, length // TOKEN_BYTES, self.pages_of(node))

    def peek(self, namespace: str, tokens: bytes) -> int:
        return self.locate(namespace, tokens, len(tokens)).length // TOKEN_BYTES

    def locate(self, namespace: str, tokens: bytes, end: int) -> Place:
        node: Node | None = self._roots.get(namespace)
        if node is None:
            return Place(Root(namespace), 0, is_end=True)
        step = self._step
        at, end = 0, end // step * step
        while at < end:
            child = node.children.get(tokens[at : at + step])
            if child is None:
                break
            shared = shared_len(tokens, at, end, child.key, step)
            at += shared
            if shared < len(child.key):
                return Place(child, at, is_end=False)
            node = child
        return Place(node, at, is_end=True)

    def pages_of(self, handle: Node) -> IntArray:
        node, above = handle, handle.parent
        pieces = []
        while above is not None:
            pieces.append(node.pages)
            node, above = above, above.parent
        if not pieces:
            return NO_PAGES
        if len(pieces) == 1:
            return np.frombuffer(pieces[0], INT32)
        pieces.reverse()
        return np.frombuffer(b"".join(pieces), INT32)

    # Change

    def insert(self, namespace: str, tokens: bytes, pages: IntArray) -> Inserted:
        end = self._aligned(tokens)
        root = self._roots.get(namespace) or Root(namespace)
        node, at = self._walk(root, tokens)
        if at < end:
            # From now on it has a child. A root without one is not kept: whoever invents a new
            # namespace for each request would fill the memory with them.
            self._roots[namespace] = root
            first = at // self._step
            piece = np.ascontiguousarray(pages[first : end // self._step], dtype=np.int32).tobytes()
            assert len(piece) // PAGE_BYTES == (end - at) // self._step, (
                "fewer pages than the sequence has"
            )
            leaf = self._new_node(tokens[at:end], piece, node)
            node.children[leaf.key[: self._step]] = leaf
            self.evictable_pages += len(piece) // PAGE_BYTES
            self._queue(leaf)
            if self.listener is not None:
                self.listener.inserted(leaf)
            node = leaf
        return Inserted(node, end // TOKEN_BYTES, at // TOKEN_BYTES)

    def lock(self, handle: Node) -> None:
        node, above = handle, handle.parent
        evictable = held = 0  # bytes of page numbers that were so before
        while above is not None:  # a root is not locked
            if not node.locks:
                if node.pins:
                    held += len(node.pages)
                else:
                    evictable += len(node.pages)
            node.locks += 1
            node, above = above, above.parent
        self._protect(evictable // PAGE_BYTES, held // PAGE_BYTES)

    def unlock(self, handle: Node) -> None:
        node, above = handle, handle.parent
        evictable = held = 0
        while above is not None:
            locks = node.locks = node.locks - 1
            assert locks >= 0, "unlocked more often than locked"
            if not locks:
                if node.pins:
                    held += len(node.pages)
                else:
                    evictable += len(node.pages)
                    if not node.children:
                        self._queue(node)
            node, above = above, above.parent
        self._protect(-(evictable // PAGE_BYTES), -(held // PAGE_BYTES))

    def pin(self, handle: Node) -> None:
        node, above = handle, handle.parent
        num_bytes = 0  # of page numbers that were evictable before
        while above is not None:
            if not node.pins and not node.locks:
                num_bytes += len(node.pages)
            node.pins += 1
            node, above = above, above.parent
        self._pin(num_bytes // PAGE_BYTES)

    def unpin(self, handle: Node) -> None:
        node, above = handle, handle.parent
        num_bytes = 0
        while above is not None:
            pins = node.pins = node.pins - 1
            assert pins >= 0, "unpinned more often than pinned"
            if not pins and not node.locks:
                num_bytes += len(node.pages)
                if not node.children:
                    self._queue(node)
            node, above = above, above.parent
        self._pin(-(num_bytes // PAGE_BYTES))

    def unshared_pages(self, handle: Node) -> int:
        node: Node | None = handle
        num_pages = 0
        while (
            node is not None and node.key and node.locks == 1
        ):  # whoever locks a node locks those above it
            num_pages += len(node.pages) // PAGE_BYTES
            node = node.parent
        return num_pages

    def evict(self, num_pages: int) -> IntArray:
        if num_pages > self.evictable_pages:
            raise OutOfPages(
                f"{num_pages} pages to evict, {self.evictable_pages} are cached and unlocked"
            )
        pieces: list[bytes] = []
        missing = num_pages
        while missing > 0:
            used, _, node = heapq.heappop(self._heap)
            node.is_queued = False
            if node.children or node.locks or node.pins:
                continue  # no evictable leaf any more; it comes back when it is one
            if node.used != used:
                self._queue(node)  # used since: back in at its true age
                continue
            held = len(node.pages) // PAGE_BYTES
            taken = min(held, missing)
            pieces.append(node.pages[(held - taken) * PAGE_BYTES :])
            missing -= taken
            if taken < held:
                self._trim(node, held - taken)
            else:
                self._remove(node)
        self.evictable_pages -= num_pages
        self.total_evicted_pages += num_pages
        return np.frombuffer(b"".join(pieces), dtype=np.int32)

    def forget(self, handle: Node) -> IntArray:
        node, above = handle, handle.parent
        gone: list[Node] = []
        while above is not None and not (node.children or node.locks or node.pins):
            gone.append(node)
            self._remove(node)
            node, above = above, above.parent
        if not gone:
            return NO_PAGES
        # They must not be found by eviction either. This is rare: no need for a quicker way.
        self._heap = [entry for entry in self._heap if entry[2] not in gone]
        heapq.heapify(self._heap)
        pages = np.frombuffer(b"".join(node.pages for node in gone), dtype=np.int32)
        self.evictable_pages -= len(pages)
        return pages

    def reset(self) -> IntArray:
        assert not self.protected_pages, "a locked cache cannot be dropped"
        assert not self.pinned_pages, "a held cache cannot be dropped"
        pages = self.owned_pages()
        self.drop()
        return pages

    def drop(self) -> None:
        self._roots.clear()
        self._heap.clear()
        self.evictable_pages = self.pinned_pages = self.protected_pages = 0
        if self.listener is not None:
            self.listener.emptied()

    # Looking on

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        stack: list[Node] = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.key:
                yield node
            stack.extend(node.children.values())

    def owned_pages(self) -> IntArray:
        return np.frombuffer(b"".join(node.pages for node in self.nodes()), dtype=np.int32)

    def check(self) -> None:
        """Assert the tree's own invariants: roots, keys, sums, locks, and that every evictable leaf is queued."""
        assert all(root.children for root in self._roots.values()), (
            "a root without children is kept"
        )
        evictable = held = protected = 0
        for node in self.nodes():
            parent = node.parent
            assert parent is not None
            assert parent.children[node.key[: self._step]] is node
            assert len(node.key) % self._step == 0
            assert len(node.key) // self._step == len(node.pages) // PAGE_BYTES
            assert not parent.key or parent.locks >= node.locks, (
                "a locked node has a parent that is locked less"
            )
            assert not parent.key or parent.pins >= node.pins, (
                "a held node has a parent that is held less"
            )
            assert parent.used >= node.used, "a node was used after its parent"
            if node.locks:
                protected += len(node.pages) // PAGE_BYTES
            elif node.pins:
                held += len(node.pages) // PAGE_BYTES
            else:
                evictable += len(node.pages) // PAGE_BYTES
                assert node.children or node.is_queued, "an evictable leaf is not queued"
        assert evictable == self.evictable_pages
        assert held == self.pinned_pages
        assert protected == self.protected_pages

    # Inside

    def _aligned(self, tokens: bytes) -> int:
        return len(tokens) // self._step * self._step

    def _walk(self, root: Node, tokens: bytes) -> tuple[Node, int]:
        """Follow `tokens` down from a root, as used now; split the last node where they part.

        Returns the node where the shared part ends, and its length in bytes.
        """
        self._clock += 1
        now, step, end = self._clock, self._step, self._aligned(tokens)
        node, at = root, 0
        root.used = now
        while at < end:
            child = node.children.get(tokens[at : at + step])
            if child is None:
                break
            if not tokens.startswith(child.key, at):
                shared = shared_len(tokens, at, end, child.key, step)
                child = self._split(child, shared)
                child.used = now
                return child, at + shared
            at += len(child.key)
            child.used = now
            node = child
        return node, at

    def _split(self, node: Node, cut: int) -> Node:
        """Put a new node above `node` that takes the first `cut` bytes of its key. Returns the new one."""
        parent = node.parent
        assert parent is not None
        cut_pages = cut // self._step * PAGE_BYTES
        upper = self._new_node(node.key[:cut], node.pages[:cut_pages], parent)
        upper.used, upper.locks, upper.pins = node.used, node.locks, node.pins
        parent.children[upper.key[: self._step]] = upper
        node.key, node.pages, node.parent = node.key[cut:], node.pages[cut_pages:], upper
        upper.children[node.key[: self._step]] = node
        if self.listener is not None:
            self.listener.split(upper, node)
        return upper

    def _new_node(self, key: bytes, pages: bytes, parent: Node) -> Node:
        self._serial += 1
        return Node(key, pages, parent, self._clock, self._serial)

    def _queue(self, node: Node) -> None:
        if not node.is_queued:
            node.is_queued = True
            heapq.heappush(self._heap, (node.used, node.serial, node))

    def _protect(self, evictable: int, held: int) -> None:
        """So many pages that were evictable or held are locked now."""
        self.evictable_pages -= evictable
        self.pinned_pages -= held
        self.protected_pages += evictable + held

    def _pin(self, pages: int) -> None:
        self.evictable_pages -= pages
        self.pinned_pages += pages

    def _trim(self, leaf: Node, pages: int) -> None:
        """Keep the first `pages` pages of a leaf."""
        leaf.key = leaf.key[: pages * self._step]
        leaf.pages = leaf.pages[: pages * PAGE_BYTES]
        self._queue(leaf)
        if self.listener is not None:
            self.listener.trimmed(leaf)

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key[: self._step]]
        if self.listener is not None:
            self.listener.removed(leaf)
        if parent.children or parent.locks or parent.pins:
            return
        if isinstance(parent, Root):
            self._roots.pop(parent.namespace, None)
        else:
            self._queue(parent)


def shared_len(tokens: bytes, at: int, end: int, key: bytes, step: int) -> int:
    """Bytes that `tokens[at:end]` and `key` share, in pages of `step` bytes. The first page is known to be shared."""
    length = min(len(key), end - at)
    if tokens[at : at + length] == (key if length == len(key) else key[:length]):
        return length
    same, differ = (
        1,
        length // step,
    )  # in pages: the first `same` are equal, the first `differ` are not
    while differ - same > 1:
        middle = (same + differ) // 2
        if tokens[at + same * step : at + middle * step] == key[same * step : middle * step]:
            same = middle
        else:
            differ = middle
    return same * step

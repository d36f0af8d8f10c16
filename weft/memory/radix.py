"""A radix tree over keys in whole pages: the prefix cache.

Each node has a piece of a sequence as packed bytes (its part of the key, and its page numbers).
Children are keyed by the bytes of their first page, so a step down is one dict lookup and one
memcmp. Eviction takes leaves, least recently used first, from a heap that persists between calls
and is corrected lazily: its cost grows with the evicted pages, not with the tree. The tree knows
keys and pages, never requests. Source: RadixAttention, arXiv:2312.07104, section 3.

    root "salt" ── [1 2 3 4] ─┬─ [5 6]        node: key, pages, locks, pins
                              └─ [7 8 9]      a request locks the path from its node to the root
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from weft.arrays import IntArray
from weft.memory.allocator import OutOfPages
from weft.memory.prefix_cache import (
    NO_PAGES,
    TOKEN_BYTES,
    CacheKey,
    CacheListener,
    Inserted,
    Location,
    Match,
    shared_len,
)

PAGE_BYTES = 4  # of a page number in `Node.pages`
MAX_WAYS = 64  # children per node that `following` looks at
LEFT_OVER = 1_024  # entries of evicted nodes that a queue may have
# Created once: looking up the type takes numpy longer than wrapping a short sequence.
INT32 = np.dtype(np.int32)


class Node:
    """A piece of sequence below `parent`."""

    __slots__ = (
        "children",
        "hits",
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
        self.key = key  # packed tokens, TOKEN_BYTES each
        self.pages = pages  # packed page numbers, PAGE_BYTES each
        self.parent = parent
        self.children = NO_CHILDREN  # by the bytes of their first page
        self.used = used  # time of its last use, in calls of the tree
        # Time of its creation, in calls of the tree: breaks ties between nodes of one path, so that
        # eviction is deterministic.
        self.serial = serial
        self.locks = 0
        self.pins = 0
        self.hits = 0  # requests that began with its sequence
        self.is_queued = False  # it is in the eviction heap


# Shared by all leaves, instead of one empty dict each. `_adopt` replaces it for the first child.
NO_CHILDREN: dict[bytes, Node] = {}


class RootNode(Node):
    """The top of one namespace: an empty piece. The tree keeps it while it has children.

    It is not a handle: a namespace that returns gets a new root.
    """

    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(b"", b"", None, 0, 0)
        self.namespace = namespace


class RadixCache:
    """See `PrefixCache` for the methods. A handle is a `Node`, or None at the top."""

    shares = True

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.listeners: list[CacheListener] = []
        self.evictable_pages = 0
        self.pinned_pages = 0
        self.protected_pages = 0
        self.total_evicted_pages = 0
        self.num_emptied = 0
        self._step = page_size * TOKEN_BYTES  # bytes of one page of a key
        self._clock = 0
        self._roots: dict[str, RootNode] = {}
        # Nodes that may be evicted, least recently used first: `used` when the node was queued,
        # `serial`, node. New leaves are in a separate queue in order of creation: they need no
        # heap, and a heap entry would add 72 bytes to the 620 of a leaf.
        self._heap: list[tuple[int, int, Node]] = []
        self._new_leaves: deque[Node] = deque()
        # Leaves to evict before all others, and their last use when `cool` was called. They are in
        # one of the other queues, too; their entries there are left over when they are evicted.
        self._cool: deque[tuple[int, Node]] = deque()
        self._num_left_over = 0

    # Lookup

    def match(self, key: CacheKey) -> Match:
        root = self._roots.get(key.namespace)
        if root is None:
            return Match(None, 0, NO_PAGES)
        tokens = key.tokens
        node, length = self._walk(root, tokens, len(tokens) // self._step * self._step)
        if node is root:
            return Match(None, 0, NO_PAGES)
        return Match(node, length // TOKEN_BYTES, self.pages_of(node))

    def peek(self, key: CacheKey) -> int:
        return self.locate(key, len(key.tokens)).length // TOKEN_BYTES

    def locate(self, key: CacheKey, end: int) -> Location:
        namespace, tokens = key
        node: Node | None = self._roots.get(namespace)
        if node is None:
            return Location(None, 0, is_end=True)
        step = self._step
        length = 0
        end = end // step * step
        while length < end:
            child = node.children.get(tokens[length : length + step])
            if child is None:
                break
            shared = shared_len(tokens, length, end, child.key, step)
            length += shared
            if shared < len(child.key):
                return Location(child, length, is_end=False)
            node = child
        return Location(node if length else None, length, is_end=True)

    def following(self, key: CacheKey, num_tokens: int) -> bytes:
        namespace, tokens = key
        root = self._roots.get(namespace)
        if root is None:
            return b""
        step = self._step
        paged_len = len(tokens) // step * step  # bytes of whole pages
        location = self.locate(key, paged_len)
        if location.length < paged_len:
            return b""
        node: Node = location.handle or root
        rest = b""  # bytes after the whole pages
        if not location.is_end:
            rest = node.key[_length_above(node, location.length) :]
        tail = tokens[paged_len:]
        num_bytes = len(tail) + num_tokens * TOKEN_BYTES
        if not rest.startswith(tail[: len(rest)]):
            return b""
        while len(rest) < num_bytes:
            begun = tail[len(rest) :]
            children = islice(node.children.values(), MAX_WAYS)
            heirs = [child for child in children if child.key.startswith(begun)]
            if not heirs:
                break
            node = max(heirs, key=_last_use)
            rest += node.key
        return rest[len(tail) : num_bytes]

    def pages_of(self, handle: Node | None) -> IntArray:
        # A loop instead of `path_up`, because every match comes here.
        pieces = []
        node = handle
        above = None if node is None else node.parent
        while node is not None and above is not None:
            pieces.append(node.pages)
            node = above
            above = node.parent
        if not pieces:
            return NO_PAGES
        if len(pieces) == 1:
            return np.frombuffer(pieces[0], INT32)
        pieces.reverse()
        return np.frombuffer(b"".join(pieces), INT32)

    # Change

    def insert(self, key: CacheKey, pages: IntArray) -> Inserted:
        """
        0 ............. present ............ length ..... len(key.tokens)
        | has been cached | becomes a new leaf | no whole page, ignored |
        """
        namespace, tokens = key
        step = self._step
        end = len(tokens) // step * step
        root = self._roots.get(namespace) or RootNode(namespace)
        node, present = self._walk(root, tokens, end)
        if present < end:
            # From now on the root has a child. A root without children is not kept, because a
            # client that invents a new namespace for each request would fill the memory with roots.
            self._roots[namespace] = root
            own_pages = pages[present // step : end // step]
            node = self._hang_leaf(node, tokens[present:end], own_pages)
        handle = None if node is root else node
        return Inserted(handle, end // TOKEN_BYTES, present // TOKEN_BYTES)

    # A page counts as protected if its node is locked, else as pinned, else as evictable.
    # `lock` and `unlock` have loops of their own instead of `path_up`, because they run twice for
    # each request.

    def lock(self, handle: Node | None) -> None:
        if handle is None:
            return
        evictable = 0  # bytes of page numbers that were evictable
        pinned = 0
        node = handle
        parent = node.parent
        while parent is not None:
            if not node.locks:
                if node.pins:
                    pinned += len(node.pages)
                else:
                    evictable += len(node.pages)
            node.locks += 1
            node = parent
            parent = node.parent
        if evictable or pinned:
            self.evictable_pages -= evictable // PAGE_BYTES
            self.pinned_pages -= pinned // PAGE_BYTES
            self.protected_pages += (evictable + pinned) // PAGE_BYTES

    def unlock(self, handle: Node | None) -> None:
        if handle is None:
            return
        evictable = 0  # bytes of page numbers that become evictable
        pinned = 0
        node = handle
        parent = node.parent
        while parent is not None:
            node.locks -= 1
            if not node.locks:
                if node.pins:
                    pinned += len(node.pages)
                else:
                    evictable += len(node.pages)
                    if not node.children:
                        self._queue(node)
            node = parent
            parent = node.parent
        # No node has lower counts than its descendants, so the lowest node is the first to go
        # wrong.
        assert handle.locks >= 0, "unlocked more often than locked"
        if evictable or pinned:
            self.evictable_pages += evictable // PAGE_BYTES
            self.pinned_pages += pinned // PAGE_BYTES
            self.protected_pages -= (evictable + pinned) // PAGE_BYTES

    def pin(self, handle: Node | None) -> None:
        num_bytes = 0  # of page numbers that were evictable
        for node in path_up(handle):
            if not node.pins and not node.locks:
                num_bytes += len(node.pages)
            node.pins += 1
        self.evictable_pages -= num_bytes // PAGE_BYTES
        self.pinned_pages += num_bytes // PAGE_BYTES

    def unpin(self, handle: Node | None) -> None:
        num_bytes = 0  # of page numbers that become evictable
        for node in path_up(handle):
            node.pins -= 1
            assert node.pins >= 0, "unpinned more often than pinned"
            if not node.pins and not node.locks:
                num_bytes += len(node.pages)
                if not node.children:
                    self._queue(node)
        self.evictable_pages += num_bytes // PAGE_BYTES
        self.pinned_pages -= num_bytes // PAGE_BYTES

    def count_hit(self, handle: Node | None) -> None:
        for node in path_up(handle):
            node.hits += 1

    def unshared_pages(self, handle: Node | None) -> int:
        num_bytes = 0
        for node in path_up(handle):
            # A lock of a node also locks its ancestors, so all ancestors of a shared node are
            # shared.
            if node.locks != 1:
                break
            num_bytes += len(node.pages)
        return num_bytes // PAGE_BYTES

    def evict(self, num_pages: int) -> IntArray:
        if num_pages > self.evictable_pages:
            raise OutOfPages(
                f"{num_pages} pages to evict, {self.evictable_pages} are cached and unlocked"
            )
        pieces = self._evict_cool(num_pages)
        missing = num_pages - sum(map(len, pieces)) // PAGE_BYTES
        while missing > 0:
            used, node = self._take_oldest()
            if self._num_left_over and not self._is_there(node):
                self._num_left_over -= 1
                continue
            node.is_queued = False
            if node.children or node.locks or node.pins:
                continue  # it is queued again when it becomes a free leaf
            if node.used != used:
                self._queue(node)  # used since: queue it again with its last use
                continue
            pieces.append(self._evict_end(node, missing))
            missing -= len(pieces[-1]) // PAGE_BYTES
        self.evictable_pages -= num_pages
        self.total_evicted_pages += num_pages
        return np.frombuffer(b"".join(pieces), dtype=np.int32)

    def cool(self, handle: Node | None) -> None:
        if handle is not None and not (handle.children or handle.locks or handle.pins):
            self._cool.append((handle.used, handle))

    def forget(self, handle: Node | None) -> IntArray:
        return self._drop(_leading_to(handle, {}))

    def forget_prefix(self, key: CacheKey) -> IntArray:
        """
        0 ................................ end of the key .....................
        | dropped up to the first page in use | dropped in all sequences that |
        | or shared with another sequence     | begin so, except pages in use |
        """
        end = len(key.tokens) // self._step * self._step
        node, length, is_end = self.locate(key, end)
        gone: dict[Node, None] = {}
        if node is not None and length == end:
            for below in reversed(list(_from_the_top([node]))):
                if _may_go(below, gone):
                    gone[below] = None
        elif not is_end:
            return NO_PAGES  # another sequence continues inside the node
        return self._drop(_leading_to(node, gone))

    def forget_pages(self, pages: IntArray) -> IntArray:
        wanted = set(pages.tolist())
        dropped = [NO_PAGES]
        # Children first: dropping a node also drops ancestors, whose pages are then no longer
        # wanted.
        for node in reversed(list(self.nodes())):
            if not wanted.isdisjoint(np.frombuffer(node.pages, INT32).tolist()):
                gone = self.forget(node)
                wanted.difference_update(gone.tolist())
                dropped.append(gone)
        return np.concatenate(dropped)

    def reset(self) -> IntArray:
        assert not self.protected_pages, "a locked cache cannot be dropped"
        assert not self.pinned_pages, "a pinned cache cannot be dropped"
        pages = self.owned_pages()
        self.drop()
        return pages

    def drop(self) -> None:
        self._roots.clear()
        self._heap.clear()
        self._new_leaves.clear()
        self._cool.clear()
        self._num_left_over = 0
        self.num_emptied += 1
        self.evictable_pages = 0
        self.pinned_pages = 0
        self.protected_pages = 0
        for listener in self.listeners:
            listener.emptied()

    # Observation

    def nodes(self) -> Iterator[Node]:
        """Every node except the roots, parents first."""
        return _from_the_top(self._roots.values())

    def tops(self) -> Iterable[Node]:
        return self._roots.values()

    def key_of(self, handle: Node | None) -> CacheKey:
        return CacheKey("", b"") if handle is None else _key_of(handle)

    def path_of(self, handle: Node | None) -> Iterable[Node]:
        return path_up(handle)

    def sequences(self) -> list[CacheKey]:
        leaves = [node for node in self.nodes() if not node.children]
        leaves.sort(key=_last_use, reverse=True)
        return [_key_of(leaf) for leaf in leaves]

    def owned_pages(self) -> IntArray:
        return np.frombuffer(b"".join(node.pages for node in self.nodes()), dtype=np.int32)

    def check(self) -> None:
        """Assert the tree's invariants: roots, keys, counts, sums, evictable leaves queued."""
        for root in self._roots.values():
            assert root.children, "a root without children is kept"
        evictable = 0
        pinned = 0
        protected = 0
        for node in self.nodes():
            self._check_node(node)
            num_pages = len(node.pages) // PAGE_BYTES
            if node.locks:
                protected += num_pages
            elif node.pins:
                pinned += num_pages
            else:
                evictable += num_pages
                assert node.children or node.is_queued, "an evictable leaf is not queued"
        assert evictable == self.evictable_pages
        assert pinned == self.pinned_pages
        assert protected == self.protected_pages

    def _check_node(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert parent.children[node.key[: self._step]] is node
        assert len(node.key) % self._step == 0
        assert len(node.key) // self._step == len(node.pages) // PAGE_BYTES
        assert parent.used >= node.used, "a node was used after its parent"
        if parent.key:
            assert parent.locks >= node.locks, "a locked node has a parent that is locked less"
            assert parent.pins >= node.pins, "a pinned node has a parent that is pinned less"

    # Inside

    def _walk(self, root: Node, tokens: bytes, end: int) -> tuple[Node, int]:
        """Follow the first `end` bytes of `tokens`, whole pages, down from a root, and mark the
        nodes as used; split the last node where the sequences differ.
        """
        self._clock += 1
        now = self._clock
        step = self._step
        node = root
        length = 0
        root.used = now
        while length < end:
            child = node.children.get(tokens[length : length + step])
            if child is None:
                break
            if not tokens.startswith(child.key, length):
                shared = shared_len(tokens, length, end, child.key, step)
                upper = self._split(child, shared)
                upper.used = now
                return upper, length + shared
            length += len(child.key)
            child.used = now
            node = child
        return node, length

    def _hang_leaf(self, parent: Node, key: bytes, pages: IntArray) -> Node:
        """Add a new leaf with `pages`, one for each page of its key, below `parent`."""
        step = self._step
        packed = np.ascontiguousarray(pages, dtype=INT32).tobytes()
        num_pages = len(packed) // PAGE_BYTES
        assert num_pages == len(key) // step, "fewer pages than the sequence has"
        leaf = Node(key, packed, parent, self._clock, self._clock)
        _adopt(parent, key[:step], leaf)
        self.evictable_pages += num_pages
        leaf.is_queued = True
        self._new_leaves.append(leaf)
        for listener in self.listeners:
            listener.inserted(leaf)
        return leaf

    def _split(self, node: Node, cut: int) -> Node:
        """Insert a new node above `node` that takes the first `cut` bytes of its key.

            parent ── node [0 ........... len]
            parent ── upper [0 .. cut] ── node [cut .. len]

        As a handle, `node` keeps its meaning: the end of its sequence.
        """
        parent = node.parent
        assert parent is not None
        step = self._step
        cut_pages = cut // step * PAGE_BYTES
        upper = Node(node.key[:cut], node.pages[:cut_pages], parent, self._clock, self._clock)
        upper.used = node.used
        upper.locks = node.locks
        upper.pins = node.pins
        upper.hits = node.hits
        parent.children[upper.key[:step]] = upper
        node.key = node.key[cut:]
        node.pages = node.pages[cut_pages:]
        node.parent = upper
        _adopt(upper, node.key[:step], node)
        for listener in self.listeners:
            listener.split(upper, node)
        return upper

    def _queue(self, node: Node) -> None:
        if not node.is_queued:
            node.is_queued = True
            heapq.heappush(self._heap, (node.used, node.serial, node))

    def _take_oldest(self) -> tuple[int, Node]:
        """Remove the first node from the queue. Returns its last use when it was queued, and the
        node."""
        heap = self._heap
        new = self._new_leaves
        if new:
            made = new[0].serial
            if not heap or (made, made) < heap[0][:2]:
                return made, new.popleft()
        used, _, node = heapq.heappop(heap)
        return used, node

    def _evict_cool(self, num_pages: int) -> list[bytes]:
        """Evict up to `num_pages` pages of what is to go before all others and was not used since.
        Returns the packed page numbers."""
        pieces: list[bytes] = []
        missing = num_pages
        while missing and self._cool:
            used, node = self._cool.popleft()
            is_free = not (node.children or node.locks or node.pins)
            if not is_free or node.used != used or not self._is_there(node):
                continue
            piece = self._evict_end(node, missing)
            pieces.append(piece)
            missing -= len(piece) // PAGE_BYTES
            if self._is_there(node):
                self._cool.appendleft((used, node))
                break
            self._num_left_over += 1
            # The piece before it, if the same request was the last to use it.
            if node.parent is not None and node.parent.key:
                self._cool.appendleft((used, node.parent))
        if self._num_left_over > LEFT_OVER + len(self._heap) // 2:
            self._tidy()
        return pieces

    def _evict_end(self, leaf: Node, num_pages: int) -> bytes:
        """Remove up to `num_pages` pages from the end of a leaf. Returns their packed numbers."""
        num_kept = max(len(leaf.pages) // PAGE_BYTES - num_pages, 0)
        piece = leaf.pages[num_kept * PAGE_BYTES :]
        if num_kept:
            self._trim(leaf, num_kept)
        else:
            self._remove(leaf)
        return piece

    def _tidy(self) -> None:
        """Remove the entries of evicted nodes."""
        self._heap = [entry for entry in self._heap if self._is_there(entry[2])]
        heapq.heapify(self._heap)
        self._new_leaves = deque(leaf for leaf in self._new_leaves if self._is_there(leaf))
        self._num_left_over = 0

    def _is_there(self, node: Node) -> bool:
        """Whether a node is in the tree: it may have been evicted."""
        assert node.parent is not None
        return node.parent.children.get(node.key[: self._step]) is node

    def _trim(self, leaf: Node, num_pages: int) -> None:
        """Keep only the first `num_pages` pages of a leaf."""
        leaf.key = leaf.key[: num_pages * self._step]
        leaf.pages = leaf.pages[: num_pages * PAGE_BYTES]
        self._queue(leaf)
        for listener in self.listeners:
            listener.trimmed(leaf)

    def _drop(self, gone: dict[Node, None]) -> IntArray:
        """Remove nodes from the tree, children before their parents. Returns their pages."""
        if not gone:
            return NO_PAGES
        for node in gone:
            node.is_queued = True  # keeps it out of the heap while its descendants are removed
        # Remove them from the heap, too: eviction must not find them, and a removed node may be as
        # old as its parent, which is queued next. This is rare, so it need not be fast.
        self._heap = [entry for entry in self._heap if entry[2] not in gone]
        heapq.heapify(self._heap)
        self._new_leaves = deque(leaf for leaf in self._new_leaves if leaf not in gone)
        for node in gone:
            self._remove(node)
        pages = np.frombuffer(b"".join(node.pages for node in gone), dtype=np.int32)
        self.evictable_pages -= len(pages)
        return pages

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key[: self._step]]
        if not parent.children:
            parent.children = NO_CHILDREN
        for listener in self.listeners:
            listener.removed(leaf)
        if parent.children or parent.locks or parent.pins:
            return
        if isinstance(parent, RootNode):
            self._roots.pop(parent.namespace, None)
        else:
            self._queue(parent)


def _adopt(parent: Node, first_page: bytes, child: Node) -> None:
    """Add `child` below `parent`, which has no child with this first page."""
    # Any empty dict may be the one that all leaves share, also after a state was restored.
    if not parent.children:
        parent.children = {}
    parent.children[first_page] = child


def _from_the_top(tops: Iterable[Node]) -> Iterator[Node]:
    """These nodes and all below them, parents first, without roots."""
    stack = list(tops)
    while stack:
        node = stack.pop()
        if node.key:
            yield node
        stack.extend(node.children.values())


def _may_go(node: Node, gone: dict[Node, None]) -> bool:
    """Whether no request uses a node or a child of it that is not in `gone`."""
    if node.locks or node.pins:
        return False
    return all(child in gone for child in node.children.values())


def _leading_to(handle: Node | None, gone: dict[Node, None]) -> dict[Node, None]:
    """`gone`, followed by the ancestors of a handle that lead to no other node."""
    for node in path_up(handle):
        if node not in gone and not _may_go(node, gone):
            break
        gone[node] = None
    return gone


def _last_use(node: Node) -> tuple[int, int]:
    return node.used, node.serial


def _key_of(end: Node) -> CacheKey:
    """The whole sequence that ends in a node."""
    pieces: list[bytes] = []
    node = end
    while node.parent is not None:
        pieces.append(node.key)
        node = node.parent
    assert isinstance(node, RootNode)
    pieces.reverse()
    return CacheKey(node.namespace, b"".join(pieces))


def _length_above(node: Node, length: int) -> int:
    """How many of the first `length` bytes of a sequence that ends in `node` are its own."""
    above = node.parent
    while above is not None:
        length -= len(above.key)
        above = above.parent
    return length


def path_up(handle: Node | None) -> Iterator[Node]:
    """The nodes from a handle to the top, without the root."""
    node = handle
    while node is not None and node.parent is not None:
        above = node.parent
        yield node
        node = above

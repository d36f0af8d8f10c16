"""The radix tree of the prefix cache: sequences in whole pages, and where each ends.

Each node has a piece of a sequence as packed bytes (its part of the key, and its page numbers).
Children are keyed by the bytes of their first page, so a step down is one dict lookup and one
memcmp. The tree finds, adds, cuts and removes nodes, and notifies its listeners. It does not know
who protects a node (`cache.py`), nor which one goes first (`eviction.py`).
Source: RadixAttention, arXiv:2312.07104, section 3.

    root "salt" ── [1 2 3 4] ─┬─ [5 6]        node: key, pages, locks, pins
                              └─ [7 8 9]      a request locks the path from its node to the root
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from weft.arrays import IntArray
from weft.memory.prefix_cache import (
    NO_PAGES,
    TOKEN_BYTES,
    CacheKey,
    CacheListener,
    Location,
    shared_len,
)

PAGE_BYTES = 4  # of a page number in `Node.pages`
MAX_WAYS = 64  # children per node that `following` looks at
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
        self.is_queued = False  # it is in the order of eviction

    @property
    def is_free(self) -> bool:
        """Whether it may be evicted: nothing protects it, and no sequence continues after it."""
        return not (self.children or self.locks or self.pins)

    def __lt__(self, other: Node) -> bool:
        """For the order of eviction, where an evicted node and its parent may be equally old: their
        order has no effect."""
        return False


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


class RadixTree:
    def __init__(self, page_size: int) -> None:
        self.listeners: list[CacheListener] = []  # notified of each change, in this order
        self.roots: dict[str, RootNode] = {}  # by namespace
        self.clock = 0  # calls of `descend`
        self.step = page_size * TOKEN_BYTES  # bytes of one page of a key

    # Lookup: changes nothing

    def locate(self, key: CacheKey, end: int) -> Location:
        """The end of the cached prefix of the first `end` bytes of a key."""
        namespace, tokens = key
        node: Node | None = self.roots.get(namespace)
        if node is None:
            return Location(None, 0, is_end=True)
        step = self.step
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
        """The packed tokens, at most `num_tokens`, that follow those of `key` in the cache; the
        last tokens of `key` need not fill a page. Empty if there are none. If there are several
        continuations, the most recently used one. Does not count as a use."""
        namespace, tokens = key
        root = self.roots.get(namespace)
        if root is None:
            return b""
        step = self.step
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

    def nodes(self) -> Iterator[Node]:
        """Every node except the roots, parents first."""
        return from_the_top(self.roots.values())

    def sequences(self) -> list[CacheKey]:
        """All cached sequences that are not the beginning of another one, most recently used
        first."""
        leaves = [node for node in self.nodes() if not node.children]
        leaves.sort(key=_last_use, reverse=True)
        return [key_of(leaf) for leaf in leaves]

    def owned_pages(self) -> IntArray:
        """Every page that the cache owns, for the audit."""
        return np.frombuffer(b"".join(node.pages for node in self.nodes()), dtype=np.int32)

    def has(self, node: Node) -> bool:
        """Whether a node is in the tree: it may have been removed."""
        assert node.parent is not None
        return node.parent.children.get(node.key[: self.step]) is node

    def check(self, node: Node) -> None:
        """Assert the invariants of one node."""
        parent = node.parent
        assert parent is not None
        assert parent.children[node.key[: self.step]] is node
        assert len(node.key) % self.step == 0
        assert len(node.key) // self.step == len(node.pages) // PAGE_BYTES
        assert parent.used >= node.used, "a node was used after its parent"
        if parent.key:
            assert parent.locks >= node.locks, "a locked node has a parent that is locked less"
            assert parent.pins >= node.pins, "a pinned node has a parent that is pinned less"

    # Change

    def descend(self, root: Node, tokens: bytes, end: int) -> tuple[Node, int]:
        """Follow the first `end` bytes of `tokens`, all of them in pages, down from a root, and
        mark the nodes as used; split the last node where the sequences differ.

        Returns the last node, and the bytes up to its end.
        """
        self.clock += 1
        now = self.clock
        step = self.step
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

    def hang(self, parent: Node, key: bytes, pages: IntArray) -> Node:
        """Add a new leaf with `pages`, one for each page of its key, below `parent`."""
        step = self.step
        packed = np.ascontiguousarray(pages, dtype=INT32).tobytes()
        assert len(packed) // PAGE_BYTES == len(key) // step, "fewer pages than the sequence has"
        leaf = Node(key, packed, parent, self.clock, self.clock)
        _adopt(parent, key[:step], leaf)
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
        step = self.step
        cut_pages = cut // step * PAGE_BYTES
        upper = Node(node.key[:cut], node.pages[:cut_pages], parent, self.clock, self.clock)
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

    def trim(self, leaf: Node, num_pages: int) -> None:
        """Keep only the first `num_pages` pages of a leaf."""
        leaf.key = leaf.key[: num_pages * self.step]
        leaf.pages = leaf.pages[: num_pages * PAGE_BYTES]
        for listener in self.listeners:
            listener.trimmed(leaf)

    def remove(self, leaf: Node) -> None:
        """Remove a leaf, and the root of a namespace with its last one."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key[: self.step]]
        for listener in self.listeners:
            listener.removed(leaf)
        if not parent.children:
            parent.children = NO_CHILDREN
            if isinstance(parent, RootNode):
                self.roots.pop(parent.namespace, None)

    def clear(self) -> None:
        """Forget all nodes, without reading them."""
        self.roots.clear()
        for listener in self.listeners:
            listener.emptied()


def path_up(handle: Node | None) -> Iterator[Node]:
    """The nodes from a handle to the top, without the root."""
    node = handle
    while node is not None and node.parent is not None:
        above = node.parent
        yield node
        node = above


def pages_of(handle: Node | None) -> IntArray:
    """The cache's pages of all of the sequence that ends at `handle`."""
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


def key_of(handle: Node | None) -> CacheKey:
    """All of the sequence that ends at `handle`."""
    if handle is None:
        return CacheKey("", b"")
    pieces: list[bytes] = []
    node = handle
    while node.parent is not None:
        pieces.append(node.key)
        node = node.parent
    assert isinstance(node, RootNode)
    pieces.reverse()
    return CacheKey(node.namespace, b"".join(pieces))


def from_the_top(tops: Iterable[Node]) -> Iterator[Node]:
    """These nodes and all below them, parents first, without roots."""
    stack = list(tops)
    while stack:
        node = stack.pop()
        if node.key:
            yield node
        if node.children:  # most nodes are leaves
            stack.extend(node.children.values())


def _adopt(parent: Node, first_page: bytes, child: Node) -> None:
    """Add `child` below `parent`, which has no child with this first page."""
    # Any empty dict may be the one that all leaves share, also after a state was restored.
    if not parent.children:
        parent.children = {}
    parent.children[first_page] = child


def _last_use(node: Node) -> tuple[int, int]:
    return node.used, node.serial


def _length_above(node: Node, length: int) -> int:
    """How many of the first `length` bytes of a sequence that ends in `node` are its own."""
    above = node.parent
    while above is not None:
        length -= len(above.key)
        above = above.parent
    return length

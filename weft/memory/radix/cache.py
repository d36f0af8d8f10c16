"""The prefix cache: what is cached (a radix tree), and what of it may be evicted.

The cache owns the pages in its tree. It never evicts a page of a locked path. It evicts a page of a
pinned path only after the path has been unpinned, which happens when memory is needed
(`accounting/pins.py`). It knows keys and pages, never requests.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import IntArray
from weft.memory.allocator import OutOfPages
from weft.memory.prefix_cache import NO_PAGES, TOKEN_BYTES, CacheKey, Inserted, Match
from weft.memory.radix.eviction import EvictionOrder
from weft.memory.radix.tree import (
    INT32,
    PAGE_BYTES,
    Node,
    RadixTree,
    RootNode,
    from_the_top,
    pages_of,
    path_up,
)

NO_MATCH = Match(None, 0, NO_PAGES)


class RadixCache:
    """A handle is a `Node`, the end of a sequence; None: nothing is cached.

    Without `shares` nothing is ever cached: every page stays with its request (SGLang: ChunkCache).
    """

    def __init__(self, page_size: int, *, shares: bool = True) -> None:
        self.page_size = page_size
        self.shares = shares  # whether an inserted sequence can be matched
        self.tree = RadixTree(page_size)
        self.order = EvictionOrder(self.tree)
        self.evictable_pages = 0  # cached, neither locked nor pinned
        self.pinned_pages = 0  # cached, pinned and not locked
        self.protected_pages = 0  # cached and locked
        self.total_evicted_pages = 0  # since the start
        self.num_emptied = 0  # number of times that everything was dropped

    # Lookup

    def match(self, key: CacheKey) -> Match:
        """Find the longest cached prefix, and mark it as used now."""
        tree = self.tree
        root = tree.roots.get(key.namespace)
        if root is None:
            return NO_MATCH
        tokens = key.tokens
        node, length = tree.descend(root, tokens, len(tokens) // tree.step * tree.step)
        if node is root:
            return NO_MATCH
        return Match(node, length // TOKEN_BYTES, pages_of(node))

    def peek(self, key: CacheKey) -> int:
        """Length in tokens of what `match` would find. Changes nothing."""
        return self.tree.locate(key, len(key.tokens)).length // TOKEN_BYTES

    # Change

    def insert(self, key: CacheKey, pages: IntArray) -> Inserted:
        """Offer the full pages of a sequence, `pages` [length / page_size].

            0 ............. present ............ length ..... len(key.tokens)
            | has been cached | becomes a new leaf | no full page, ignored |

        From then on the cache owns `pages[present / page_size :]`.
        """
        if not self.shares:
            return Inserted(None, 0, 0)
        namespace, tokens = key
        tree = self.tree
        step = tree.step
        end = len(tokens) // step * step
        root = tree.roots.get(namespace) or RootNode(namespace)
        node, present = tree.descend(root, tokens, end)
        if present < end:
            # From now on the root has a child. A root without children is not kept, because a
            # client that invents a new namespace for each request would fill the memory with roots.
            tree.roots[namespace] = root
            own_pages = pages[present // step : end // step]
            self.evictable_pages += len(own_pages)
            node = tree.hang(node, tokens[present:end], own_pages)
            node.is_queued = True
            self.order.new_leaves.append(node)
        handle = None if node is root else node
        return Inserted(handle, end // TOKEN_BYTES, present // TOKEN_BYTES)

    # A page counts as protected if its node is locked, else as pinned, else as evictable.
    # `lock` and `unlock` have loops of their own instead of `path_up`, because they run twice for
    # each request.

    def lock(self, handle: Node | None) -> None:
        """Protect the sequence that ends at `handle` until it is unlocked as many times."""
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
                        self.order.add(node)
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
        """Protect like `lock`, but with a separate count, until it is unpinned as many times."""
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
                    self.order.add(node)
        self.evictable_pages += num_bytes // PAGE_BYTES
        self.pinned_pages -= num_bytes // PAGE_BYTES

    def count_hit(self, handle: Node | None) -> None:
        """Count a request that begins with the sequence ending at `handle`. No decision uses
        this."""
        for node in path_up(handle):
            node.hits += 1

    def unshared_pages(self, handle: Node | None) -> int:
        """Pages that one `unlock` of the sequence that ends at `handle` would unprotect."""
        num_bytes = 0
        for node in path_up(handle):
            # A lock of a node also locks its ancestors, so all ancestors of a shared node are
            # shared.
            if node.locks != 1:
                break
            num_bytes += len(node.pages)
        return num_bytes // PAGE_BYTES

    def evict(self, num_pages: int) -> IntArray:
        """Drop evictable pages, least recently used sequences first, from their ends.

        Returns the pages [num_pages]; they belong to the caller. Raises OutOfPages if there are
        fewer; then nothing has been dropped.
        """
        if num_pages > self.evictable_pages:
            raise OutOfPages(
                f"{num_pages} pages to evict, {self.evictable_pages} are cached and unlocked"
            )
        order = self.order
        pieces: list[bytes] = []
        missing = num_pages
        while missing > 0 and (cool := order.next_cool()) is not None:
            num_bytes = len(cool.pages)
            piece = self._evict_end(cool, missing)
            if len(piece) == num_bytes:
                order.cool_is_evicted()
            pieces.append(piece)
            missing -= len(piece) // PAGE_BYTES
        while missing > 0:
            piece = self._evict_end(order.take_oldest(), missing)
            pieces.append(piece)
            missing -= len(piece) // PAGE_BYTES
        self.evictable_pages -= num_pages
        self.total_evicted_pages += num_pages
        return np.frombuffer(b"".join(pieces), dtype=np.int32)

    def cool(self, handle: Node | None) -> None:
        """Evict the end of the sequence that ends at `handle` before all others, unless it is used
        again or another sequence continues after it."""
        if handle is not None and handle.is_free:
            self.order.cool(handle)

    def forget(self, handle: Node | None) -> IntArray:
        """Drop the end of the sequence that ends at `handle`, up to the first page still in use.

        Pages are in use if they are locked or pinned, or if another sequence continues after them.
        Returns the dropped pages; they belong to the caller.
        """
        return self._drop(_leading_to(handle, {}))

    def forget_prefix(self, key: CacheKey) -> IntArray:
        """`forget` every sequence that begins with a key, in full pages; if only a part of the key
        is cached, that part. Returns the dropped pages; they belong to the caller.

            0 ................................ end of the key .....................
            | dropped up to the first page in use | dropped in all sequences that |
            | or shared with another sequence     | begin so, except pages in use |
        """
        step = self.tree.step
        end = len(key.tokens) // step * step
        node, length, is_end = self.tree.locate(key, end)
        gone: dict[Node, None] = {}
        if node is not None and length == end:
            for below in reversed(list(from_the_top([node]))):
                if _may_go(below, gone):
                    gone[below] = None
        elif not is_end:
            return NO_PAGES  # another sequence continues inside the node
        return self._drop(_leading_to(node, gone))

    def forget_pages(self, pages: IntArray) -> IntArray:
        """`forget` every sequence that ends in a node with one of these pages. Returns the dropped
        pages; they belong to the caller."""
        wanted = set(pages.tolist())
        dropped = [NO_PAGES]
        # Children first: dropping a node also drops ancestors, whose pages are then no longer
        # wanted.
        for node in reversed(list(self.tree.nodes())):
            if not wanted.isdisjoint(np.frombuffer(node.pages, INT32).tolist()):
                gone = self.forget(node)
                wanted.difference_update(gone.tolist())
                dropped.append(gone)
        return np.concatenate(dropped)

    def reset(self) -> IntArray:
        """Drop everything; nothing may be locked or pinned. The returned pages are the caller's."""
        assert not self.protected_pages, "a locked cache cannot be dropped"
        assert not self.pinned_pages, "a pinned cache cannot be dropped"
        pages = self.tree.owned_pages()
        self.drop()
        return pages

    def drop(self) -> None:
        """Drop everything, even if locked, without reading it. All handles become invalid.

        The caller knows the owners of the pages afterwards.
        """
        self.order.clear()
        self.num_emptied += 1
        self.evictable_pages = 0
        self.pinned_pages = 0
        self.protected_pages = 0
        self.tree.clear()

    def check(self) -> None:
        """Assert the invariants: roots, keys, counts, sums, evictable leaves queued."""
        for root in self.tree.roots.values():
            assert root.children, "a root without children is kept"
        evictable = 0
        pinned = 0
        protected = 0
        for node in self.tree.nodes():
            self.tree.check(node)
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

    # Inside

    def _evict_end(self, leaf: Node, num_pages: int) -> bytes:
        """Remove up to `num_pages` pages from the end of a leaf. Returns their packed numbers."""
        piece = leaf.pages
        num_kept = len(piece) // PAGE_BYTES - num_pages
        if num_kept <= 0:
            self._remove(leaf)
            return piece
        self.tree.trim(leaf, num_kept)
        self.order.add(leaf)
        return piece[num_kept * PAGE_BYTES :]

    def _drop(self, gone: dict[Node, None]) -> IntArray:
        """Remove nodes from the tree, children before their parents. Returns their pages."""
        if not gone:
            return NO_PAGES
        for node in gone:
            node.is_queued = True  # keeps it out of the order while its descendants are removed
        # Eviction must not find them, and a removed node may be as old as its parent, which is
        # queued next.
        self.order.discard(gone)
        for node in gone:
            self._remove(node)
        pages = np.frombuffer(b"".join(node.pages for node in gone), dtype=np.int32)
        self.evictable_pages -= len(pages)
        return pages

    def _remove(self, leaf: Node) -> None:
        self.tree.remove(leaf)
        parent = leaf.parent
        if parent is not None and parent.key and parent.is_free:
            self.order.add(parent)


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

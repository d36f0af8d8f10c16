"""The tails that the prefix cache keeps of layers with windows.

The next token of a sequence sees only the window before it, or its chunk. So a cached prefix can be
resumed if the pages that this token sees are cached, its *tail*. Tails belong to nodes of the radix
tree, always to their ends:

    node A ── node B ─┬─ node C          A tail of B: |...[ window ]|
                      └─ node D                       ^ 0           ^ the end of B

There are two kinds, and when pages are needed, all *spare* ones are evicted first.

- An *end* has one window, and one page more (`more`), for a request that must compute its last
  page. Ends are prompts, outputs, and places where sequences diverge. The least recently used end
  is evicted first, always as a whole, because half of a tail is useless. (vLLM frees them page by
  page as soon as requests end, and then no request finds a whole window: vllm #48435.)
- A *spare* tail has all pages that the row owned at that time, which are more: a prompt that
  diverges from another one inside the tail still finds its window. If exactly one sequence
  continues after an end, the end becomes spare.

Tails share pages, so the pool counts their users (`pool.py`). Tails are not locked: a row that
continues after a tail holds its pages. This listener follows the changes of the tree, and knows no
rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from weft.arrays import IntArray
from weft.config.sight import Sight
from weft.memory.prefix_cache import TOKEN_BYTES
from weft.memory.radix.tree import Node, path_up
from weft.memory.window.pool import WindowPool


class Tail(NamedTuple):
    """Pages of the sequence that ends with a node: first, first + 1 .. end - 1."""

    pages: IntArray  # [end - first]
    end: int  # number of pages of the whole sequence

    @property
    def first(self) -> int:
        return self.end - len(self.pages)


Tails: TypeAlias = OrderedDict[Node, Tail]  # least recently used first


class WindowTails:
    """The `CacheListener` of a radix tree with pages of `page_size` tokens."""

    def __init__(self, pool: WindowPool, sight: Sight, page_size: int) -> None:
        self._pool = pool
        self._sight = sight
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self.more = 1  # pages that an end keeps besides its window
        self.ends: Tails = OrderedDict()
        self.spare: Tails = OrderedDict()
        self.total_evicted_pages = 0  # since the start

    # Lookup

    def deepest(self, handle: Node | None, num_pages: int) -> tuple[Node | None, int]:
        """The longest prefix of a cached sequence, of `num_pages` up to `handle`, that can be
        resumed: its end, and its number of pages. Counts as a use."""
        end = num_pages
        for node in path_up(handle):
            if self._use(node):
                return node, end
            end -= self._num_pages(node)
        return None, 0

    def window_before(self, node: Node) -> IntArray:
        """The last pages of a prefix that a request needs to continue after a node. As a request
        continues here, the tail becomes an end."""
        tail = self._at(node)
        assert tail is not None, "a prefix without its window was matched"
        if node not in self.ends:
            self._put(self.ends, node, self._lean(tail, tail.end))
        needed = tail.end - self._first_seen(tail.end)
        return tail.pages[len(tail.pages) - needed :]

    def can_resume(self, node: Node, num_pages: int) -> bool:
        """Whether a sequence can be resumed after `num_pages`, with the tail at `node`, whose end
        is at or after these pages."""
        tail = self._at(node)
        return tail is not None and num_pages <= tail.end and self._covers(tail, num_pages)

    def num_pages_to_resume(self, num_pages: int) -> int:
        """How many of the last pages of a sequence of `num_pages` pages a store has."""
        return max(num_pages - self._first_seen(num_pages), 1)

    def pages_to_resume(self, node: Node) -> IntArray:
        """The last pages of the sequence that ends at a node, as many as a store has."""
        tail = self._at(node)
        assert tail is not None, "a resume state is asked for where there is none"
        return tail.pages[len(tail.pages) - self.num_pages_to_resume(tail.end) :]

    # Tails of rows

    def bring(self, node: Node, tail: Tail) -> None:
        """Keep a tail of the sequence that ends at `node`; its pages are owned in the pool."""
        if not self._use(node):
            self._put(self.ends, node, tail)
            self._demote_above(node)

    def leave(self, handle: Node | None, owned: Tail, since: int) -> None:
        """A row has inserted its sequence into the tree up to `handle`, and owns `owned` of it,
        which ends there. Keep it, and a tail wherever the tree has an end after the first `since`
        pages."""
        if handle is None:
            return
        if owned.end > since and self._covers(owned, owned.end):
            self._put(self.spare, handle, owned)
        end = owned.end
        for node in path_up(handle):
            if end <= since or not self._covers(owned, end):
                break
            if node not in self.ends:
                self._put(self.ends, node, self._lean(owned, end))
            end -= self._num_pages(node)
        self._demote_above(handle)

    # Eviction

    def evict(self, num_pages: int) -> int:
        """Drop tails until `num_pages` are free, or no tail is left that may be dropped. Returns
        the number of pages that became free."""
        num_freed = self._evict_of(self.spare, num_pages)
        if num_freed < num_pages:
            num_freed += self._evict_of(self.ends, num_pages - num_freed)
        self.total_evicted_pages += num_freed
        return num_freed

    def _evict_of(self, tails: Tails, num_pages: int) -> int:
        num_freed = 0
        skipped: list[tuple[Node, Tail]] = []
        while tails and num_freed < num_pages:
            node, tail = tails.popitem(last=False)
            # Pages that rows hold cannot be freed. A pinned tail is dropped after its session lost
            # the pin.
            is_pinned = tails is self.ends and _is_pinned(node)
            if is_pinned or not self._pool.is_evictable(tail.pages):
                skipped.append((node, tail))
                continue
            num_freed += self._pool.drop(tail.pages)
        for node, tail in reversed(skipped):
            tails[node] = tail
            tails.move_to_end(node, last=False)
        return num_freed

    # Changes of the tree

    def inserted(self, leaf: Node) -> None:
        pass

    def split(self, upper: Node, lower: Node) -> None:
        """Sequences diverge here, so this is an end, if the window before it is cached."""
        tail = self._at(lower)
        if tail is None:
            return
        end = tail.end - self._num_pages(lower)
        if self._covers(tail, end):
            self._put(self.ends, upper, self._lean(tail, end))

    def trimmed(self, leaf: Node) -> None:
        tail = self._at(leaf)
        if tail is None:
            return
        end = sum(map(self._num_pages, path_up(leaf)))
        # The shorter tail takes its pages before the old one drops them.
        shorter = Tail(tail.pages[: end - tail.first], end)
        covers = self._covers(tail, end)
        if covers:
            self._pool.keep(shorter.pages)
        self.removed(leaf)
        if covers:
            self.spare[leaf] = shorter

    def removed(self, leaf: Node) -> None:
        for tails in (self.ends, self.spare):
            tail = tails.pop(leaf, None)
            if tail is not None:
                self._pool.drop(tail.pages)

    def emptied(self) -> None:
        for tails in (self.ends, self.spare):
            while tails:
                _, tail = tails.popitem()
                self._pool.drop(tail.pages)

    def forget(self) -> None:
        """Every page has been freed: drop all tails, without reading them."""
        self.ends.clear()
        self.spare.clear()

    # Observation

    def all(self) -> Iterator[tuple[Node, Tail]]:
        yield from self.ends.items()
        yield from self.spare.items()

    # Inside

    def _at(self, node: Node) -> Tail | None:
        """The tail of a node, the longer one if there are two."""
        return self.spare.get(node) or self.ends.get(node)

    def _use(self, node: Node) -> bool:
        """Mark the tails of a node as used now. Returns whether there are any."""
        found = False
        for tails in (self.ends, self.spare):
            if node in tails:
                tails.move_to_end(node)
                found = True
        return found

    def _first_seen(self, num_pages: int) -> int:
        """The first page that the token after `num_pages` pages sees, maybe in part."""
        return self._sight.first(num_pages * self._page_size) // self._page_size

    def _covers(self, tail: Tail, end: int) -> bool:
        """Whether a tail has the window before the page `end`."""
        return tail.first <= self._first_seen(end) and end > tail.first

    def _lean(self, tail: Tail, end: int) -> Tail:
        """The part of a tail with the window before the page `end`, and one more page if
        possible."""
        first = max(self._first_seen(end) - self.more, tail.first)
        return Tail(tail.pages[first - tail.first : end - tail.first], end)

    def _put(self, tails: Tails, node: Node, tail: Tail) -> None:
        self._pool.keep(tail.pages)
        before = tails.pop(node, None)
        tails[node] = tail
        if before is not None:
            self._pool.drop(before.pages)

    def _demote_above(self, handle: Node) -> None:
        """Make ends above a new end spare, if exactly one sequence continues after them."""
        for node in path_up(handle):
            goes_on_once = node is not handle and len(node.children) == 1
            if not goes_on_once or node not in self.ends or _is_pinned(node):
                continue
            tail = self.ends.pop(node)
            if node in self.spare:
                self._pool.drop(tail.pages)
            else:
                self.spare[node] = tail

    def _num_pages(self, node: Node) -> int:
        return len(node.key) // self._page_bytes


def _is_pinned(node: Node) -> bool:
    """Whether a pinned sequence ends here. Every ancestor of a pinned node is pinned, too."""
    if not node.pins:
        return False
    pinned_below = sum(child.pins for child in node.children.values())
    return node.pins > pinned_below

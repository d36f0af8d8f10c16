"""Pages of which a request can use only the first tokens: these are copied into a page of its own,
instead of being computed again.

The prefix cache shares full pages. Two sequences rarely part at the border of a page, and hardly
any sequence ends at one. Two kinds of pages have the next tokens of a request:

    cached sequence    | page | page | a b c d |      a node below the end of the matched prefix
    ended sequence     | page | page | a b . . |      its last page, which no node can have
    request            | page | page | a b x ..       copies a and b, and computes from x on

Only what requests of the same tenant have computed is found: how much of a page is found would tell
a client, token by token, what others have sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import numpy as np

from weft.arrays import IntArray
from weft.memory.accounting.holders import Holder
from weft.memory.allocator import PageAllocator
from weft.memory.prefix_cache import NO_PAGES, TOKEN_BYTES, shared_len
from weft.memory.radix.cache import RadixCache
from weft.memory.radix.tree import INT32, MAX_WAYS, Node

POOL_PART = 64  # the last pages of ended sequences take at most one in this many of the pool


class PartPage(NamedTuple):
    page: int
    num_tokens: int  # that the request and the page begin with in common


NO_PART = PartPage(-1, 0)


class EndPage(NamedTuple):
    """The last page of a sequence that ended inside of it."""

    tokens: bytes  # packed, less than a page
    page: int
    tenant: str  # of the request that has computed it


class PartPages(Holder):
    """Finds the page of which a request can copy most. It owns the last pages of ended sequences,
    at most one for each node, until their node leaves the cache or memory is needed."""

    def __init__(self, allocator: PageAllocator, cache: RadixCache) -> None:
        self._allocator = allocator
        self._page_bytes = cache.tree.step
        self._most = max(allocator.num_pages // POOL_PART, 1)
        # By the node that has the full pages before, the least recently used first.
        self._ends: OrderedDict[Node, EndPage] = OrderedDict()
        self._tenants: dict[Node, str] = {}  # of the requests that have computed a node
        self.num_owned = 0
        cache.tree.listeners.append(self)

    def find(self, node: Node, tokens: bytes, tenant: str) -> PartPage:
        """The page of which a request of `tenant` can copy the most of its next `tokens`, packed,
        after the sequence that ends at `node`."""
        found = NO_PART
        end = self._ends.get(node)
        if end is not None and end.tenant == tenant:
            num_tokens = self._num_shared(tokens, end.tokens)
            if num_tokens:
                found = PartPage(end.page, num_tokens)
                self._ends.move_to_end(node)
        first = tokens[:TOKEN_BYTES]
        for child in islice(node.children.values(), MAX_WAYS):
            if not child.key.startswith(first) or self._tenants.get(child) != tenant:
                continue
            num_tokens = self._num_shared(tokens, child.key)
            if num_tokens > found.num_tokens:
                page = int(np.frombuffer(child.pages, INT32, 1)[0])
                found = PartPage(page, num_tokens)
        return found

    def inserted_by(self, node: Node, tenant: str) -> None:
        """A request of `tenant` has computed all that is new in a node."""
        self._tenants[node] = tenant

    def keep(self, node: Node, end: EndPage) -> None:
        """Take the last page of a sequence whose full pages end at `node`."""
        self.trimmed(node)
        if len(self._ends) == self._most:
            self.give_up(1)
        self._ends[node] = end
        self.num_owned += 1

    def give_up(self, num_pages: int) -> None:
        """Free this many pages, or all of them, the least recently used first."""
        num_pages = min(num_pages, len(self._ends))
        self._free([self._ends.popitem(last=False)[1] for _ in range(num_pages)])

    def forget(self, pages: IntArray) -> None:
        """Free those of these pages that are last pages of ended sequences."""
        written = set(pages.tolist())
        for node in [node for node, end in self._ends.items() if end.page in written]:
            self.trimmed(node)

    def _num_shared(self, tokens: bytes, others: bytes) -> int:
        end = min(len(tokens), self._page_bytes)
        return shared_len(tokens, 0, end, others[:end], TOKEN_BYTES) // TOKEN_BYTES

    def _free(self, ends: list[EndPage]) -> None:
        self._allocator.free(_pages_of(ends))
        self.num_owned -= len(ends)

    # As a listener of the cache

    def inserted(self, leaf: Node) -> None:
        pass

    def split(self, upper: Node, lower: Node) -> None:
        tenant = self._tenants.get(lower)
        if tenant is not None:
            self._tenants[upper] = tenant

    def trimmed(self, leaf: Node) -> None:
        """The sequence does not end at this node any more."""
        end = self._ends.pop(leaf, None)
        if end is not None:
            self._free([end])

    def removed(self, leaf: Node) -> None:
        self._tenants.pop(leaf, None)
        self.trimmed(leaf)

    def emptied(self) -> None:
        self._tenants.clear()
        self.give_up(len(self._ends))

    # As a holder

    def reclaim(self) -> bool:
        self.give_up(len(self._ends))
        return False

    def before_reset(self, why: str) -> None:
        self._ends.clear()
        self._tenants.clear()
        self.num_owned = 0

    def weights_changed(self, why: str) -> None:
        self._tenants.clear()
        self.give_up(len(self._ends))

    def owned(self) -> dict[str, IntArray]:
        return {"last pages of ended sequences": _pages_of(self._ends.values())}


def _pages_of(ends: Iterable[EndPage]) -> IntArray:
    pages = [end.page for end in ends]
    return np.array(pages, dtype=np.int32) if pages else NO_PAGES

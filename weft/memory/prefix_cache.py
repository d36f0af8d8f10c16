"""The protocol of a prefix cache, and the twin that caches nothing.

Token sequences are packed int32 bytes: Python compares and slices those faster than any list or array. Sequences of
different namespaces (another salt, another adapter) never share. The cache owns the pages that it holds; the ones on a
locked path are never evicted, nor are those on a pinned one until its owner unpins it, or memory is needed
(`pins.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from weft.memory.allocator import IntArray, OutOfPages

TOKEN_BYTES = 4  # of a token id in a packed sequence
Handle: TypeAlias = Any  # a place in the cache, opaque to its users

NO_PAGES = np.empty(0, dtype=np.int32)


class Match(NamedTuple):
    """The longest cached prefix of a sequence, in whole pages."""

    handle: Handle  # where it ends; lock it to keep it
    length: int  # in tokens
    pages: IntArray  # [length / page_size]; they belong to the cache


class Inserted(NamedTuple):
    """What became of a sequence that was offered to the cache."""

    handle: Handle  # where it ends in the cache
    length: int  # tokens of it that the cache holds now
    present: int  # tokens of it that were there before; the caller's own pages for these are duplicates it may free


class Listener(Protocol):
    """Is told how the cache has just changed. Handles have `key` (packed tokens), `parent`, and no key at the top."""

    def inserted(self, leaf: Handle) -> None:
        """A new leaf hangs below its parent."""
        ...

    def split(self, upper: Handle, lower: Handle) -> None:
        """`upper` is new and has the beginning of what `lower` was; `lower` hangs below it with the rest."""
        ...

    def trimmed(self, leaf: Handle) -> None:
        """The end of a leaf was evicted."""
        ...

    def removed(self, leaf: Handle) -> None:
        """A leaf was evicted; its `parent` still says where it was."""
        ...

    def emptied(self) -> None:
        """Everything was dropped."""
        ...


class Place(NamedTuple):
    """Where the cached prefix of a sequence ends."""

    handle: Handle
    length: int  # of the prefix, in bytes of packed tokens
    is_end: bool  # at the end of what the handle holds; else inside


class PrefixCache(Protocol):
    page_size: int
    listener: Listener | None
    shares: bool  # whether a sequence that was inserted can be matched
    evictable_pages: int  # cached, neither locked nor held
    pinned_pages: int  # cached, held and not locked
    protected_pages: int  # cached and locked
    total_evicted_pages: int  # since the start

    def match(self, namespace: str, tokens: bytes) -> Match:
        """Find the longest cached prefix, and mark it as used now."""
        ...

    def peek(self, namespace: str, tokens: bytes) -> int:
        """Length in tokens of what `match` would find. Changes nothing."""
        ...

    def locate(self, namespace: str, tokens: bytes, end: int) -> Place:
        """Where the cached prefix of `tokens[:end]` ends. Changes nothing."""
        ...

    def insert(self, namespace: str, tokens: bytes, pages: IntArray) -> Inserted:
        """Offer whole pages of a sequence. The cache then owns `pages[present / page_size : length / page_size]`."""
        ...

    def pages_of(self, handle: Handle) -> IntArray:
        """The cache's pages of the whole sequence that ends at `handle`."""
        ...

    def lock(self, handle: Handle) -> None:
        """Protect the sequence that ends at `handle` from eviction, until as many calls of `unlock`."""
        ...

    def unlock(self, handle: Handle) -> None: ...

    def pin(self, handle: Handle) -> None:
        """Protect as `lock` does, but counted apart, until as many calls of `unpin`."""
        ...

    def unpin(self, handle: Handle) -> None: ...

    def unshared_pages(self, handle: Handle) -> int:
        """Pages that become evictable, or held, when one lock of the sequence that ends at `handle` is taken off."""
        ...

    def evict(self, num_pages: int) -> IntArray:
        """Drop `num_pages` evictable pages, least recently used sequences first, from their ends.

        Returns them [num_pages]; they belong to the caller. Raises OutOfPages if there are fewer; then nothing has
        been dropped.
        """
        ...

    def forget(self, handle: Handle) -> IntArray:
        """Drop the end of the sequence that ends at `handle`, as far as it is neither locked nor held and nothing else
        goes on from it. Returns its pages; they belong to the caller."""
        ...

    def reset(self) -> IntArray:
        """Drop everything. Nothing may be locked or held. Returns the pages; they belong to the caller."""
        ...

    def drop(self) -> None:
        """Forget everything, locked or not, and look at none of it. Handles mean nothing any more. Whose the pages are
        then, the caller knows."""
        ...

    def owned_pages(self) -> IntArray:
        """Every page that the cache holds, for the audit."""
        ...


class NoPrefixCache:
    """Pins nothing: every page stays with its request (SGLang: ChunkCache)."""

    shares = False
    listener: Listener | None = None
    evictable_pages = 0
    pinned_pages = 0
    protected_pages = 0
    total_evicted_pages = 0

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def match(self, namespace: str, tokens: bytes) -> Match:
        return Match(None, 0, NO_PAGES)

    def peek(self, namespace: str, tokens: bytes) -> int:
        return 0

    def locate(self, namespace: str, tokens: bytes, end: int) -> Place:
        return Place(None, 0, is_end=True)

    def insert(self, namespace: str, tokens: bytes, pages: IntArray) -> Inserted:
        return Inserted(None, 0, 0)

    def pages_of(self, handle: Handle) -> IntArray:
        return NO_PAGES

    def lock(self, handle: Handle) -> None:
        pass

    def unlock(self, handle: Handle) -> None:
        pass

    def pin(self, handle: Handle) -> None:
        pass

    def unpin(self, handle: Handle) -> None:
        pass

    def unshared_pages(self, handle: Handle) -> int:
        return 0

    def evict(self, num_pages: int) -> IntArray:
        if num_pages:
            raise OutOfPages(f"{num_pages} pages to evict; nothing is cached")
        return NO_PAGES

    def forget(self, handle: Handle) -> IntArray:
        return NO_PAGES

    def reset(self) -> IntArray:
        return NO_PAGES

    def drop(self) -> None:
        pass

    def owned_pages(self) -> IntArray:
        return NO_PAGES

    def check(self) -> None:
        pass

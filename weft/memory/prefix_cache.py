"""The protocol of a prefix cache, and the twin that caches nothing.

The cache owns the pages that it holds. It never evicts a page of a locked path. It evicts a page
of a pinned path only after its owner has unpinned the path, which happens when memory is needed
(`pins.py`). It knows keys and pages, never requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from weft.arrays import IntArray
from weft.memory.allocator import OutOfPages

TOKEN_BYTES = 4  # of one token in a key
Handle: TypeAlias = Any  # a place in the cache, opaque to its users; None: nothing is cached

NO_PAGES = np.empty(0, dtype=np.int32)


class CacheKey(NamedTuple):
    """What the cache compares of a sequence. Sequences of different namespaces never share.

    Python compares and slices packed bytes faster than any list or array. For text the bytes are
    the token ids. They need not be: whatever K and V depend on besides the ids (an image in the
    place of its tokens) has to be in the bytes, and what they depend on as a whole (an adapter,
    a salt) in the namespace.
    """

    namespace: str
    tokens: bytes  # TOKEN_BYTES for each token


class Match(NamedTuple):
    """The longest cached prefix of a sequence, in whole pages."""

    handle: Handle  # where it ends; lock it to keep it
    length: int  # in tokens
    pages: IntArray  # [length / page_size]; they belong to the cache


class Inserted(NamedTuple):
    """What became of a sequence that was offered to the cache."""

    handle: Handle  # where it ends in the cache
    length: int  # tokens of it that the cache holds now
    # Tokens of it that the cache had before. The caller's own pages for these are duplicates,
    # which the caller may free.
    present: int


class CacheListener(Protocol):
    """Follows the changes of a cache. Handles have `key` (packed tokens) and `parent`.

    At the top of a namespace stands a handle with an empty key and the name in `namespace`.
    """

    def inserted(self, leaf: Handle) -> None:
        """A new leaf hangs below its parent."""
        ...

    def split(self, upper: Handle, lower: Handle) -> None:
        """`lower` was cut: the new `upper` has its beginning, and `lower`, below it, the rest."""
        ...

    def trimmed(self, leaf: Handle) -> None:
        """The end of a leaf was evicted."""
        ...

    def removed(self, leaf: Handle) -> None:
        """A leaf was evicted; its `parent` still says where it was."""
        ...

    def emptied(self) -> None:
        """The cache holds nothing any more."""
        ...


class Place(NamedTuple):
    """Where the cached prefix of a sequence ends."""

    handle: Handle
    length: int  # of the prefix, in bytes of the key
    is_end: bool  # at the end of what the handle holds; else inside


class PrefixCache(Protocol):
    page_size: int
    listeners: list[CacheListener]  # told of each change, in this order
    shares: bool  # whether a sequence that was inserted can be matched
    evictable_pages: int  # cached, neither locked nor pinned
    pinned_pages: int  # cached, pinned and not locked
    protected_pages: int  # cached and locked
    total_evicted_pages: int  # since the start

    def match(self, key: CacheKey) -> Match:
        """Find the longest cached prefix, and mark it as used now."""
        ...

    def peek(self, key: CacheKey) -> int:
        """Length in tokens of what `match` would find. Changes nothing."""
        ...

    def locate(self, key: CacheKey, end: int) -> Place:
        """Where the cached prefix of the first `end` bytes of a key ends. Changes nothing."""
        ...

    def following(self, key: CacheKey, num_tokens: int) -> bytes:
        """The packed tokens, at most `num_tokens`, that stand behind those of `key` in the cache,
        where its last ones need not fill a page; nothing if there are none. Where several ways go
        on, that of the last use. It counts as no use."""
        ...

    def insert(self, key: CacheKey, pages: IntArray) -> Inserted:
        """Offer the whole pages of a sequence, `pages` [length / page_size].

        From then on the cache owns `pages[present / page_size :]`.
        """
        ...

    def pages_of(self, handle: Handle) -> IntArray:
        """The cache's pages of the whole sequence that ends at `handle`."""
        ...

    def lock(self, handle: Handle) -> None:
        """Protect the sequence that ends at `handle` until it is unlocked as many times."""
        ...

    def unlock(self, handle: Handle) -> None: ...

    def pin(self, handle: Handle) -> None:
        """Protect as `lock` does, but count apart, until it is unpinned as many times."""
        ...

    def unpin(self, handle: Handle) -> None: ...

    def unshared_pages(self, handle: Handle) -> int:
        """Pages that one `unlock` of the sequence that ends at `handle` would unprotect."""
        ...

    def count_hit(self, handle: Handle) -> None:
        """A request begins with the sequence that ends at `handle`. Nothing is decided by that."""
        ...

    def evict(self, num_pages: int) -> IntArray:
        """Drop evictable pages, least recently used sequences first, from their ends.

        Returns them [num_pages]; they belong to the caller. Raises OutOfPages if there are fewer;
        then nothing has been dropped.
        """
        ...

    def forget(self, handle: Handle) -> IntArray:
        """Drop the end of the sequence that ends at `handle`, up to the first page still in use.

        In use are pages that are locked or pinned, or from which another sequence goes on.
        Returns the dropped pages; they belong to the caller.
        """
        ...

    def forget_prefix(self, key: CacheKey) -> IntArray:
        """`forget` every sequence that begins with a key, in whole pages; where only a part of the
        key is cached, that part. Returns the dropped pages; they belong to the caller."""
        ...

    def forget_pages(self, pages: IntArray) -> IntArray:
        """`forget` every sequence that ends where one of these pages is. Returns the dropped
        pages; they belong to the caller."""
        ...

    def reset(self) -> IntArray:
        """Drop all, when nothing is locked or pinned. The pages returned are the caller's."""
        ...

    def drop(self) -> None:
        """Forget all, locked or not, without reading any of it. No handle is valid any more.

        The caller knows who owns the pages then.
        """
        ...

    def key_of(self, handle: Handle) -> CacheKey:
        """The whole sequence that ends at `handle`."""
        ...

    def path_of(self, handle: Handle) -> Iterable[Any]:
        """The nodes from `handle` up to the first one below the top; to look on."""
        ...

    def sequences(self) -> list[CacheKey]:
        """All sequences that are cached and are no beginning of another one, the last used
        first."""
        ...

    def owned_pages(self) -> IntArray:
        """Every page that the cache owns, for the audit."""
        ...

    def tops(self) -> Iterable[Any]:
        """The nodes that stand above all others, one for each namespace; to look on."""
        ...


class NoPrefixCache:
    """Caches nothing: every page stays with its request (SGLang: ChunkCache)."""

    shares = False
    evictable_pages = 0
    pinned_pages = 0
    protected_pages = 0
    total_evicted_pages = 0

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.listeners: list[CacheListener] = []

    def match(self, key: CacheKey) -> Match:
        return Match(None, 0, NO_PAGES)

    def peek(self, key: CacheKey) -> int:
        return 0

    def locate(self, key: CacheKey, end: int) -> Place:
        return Place(None, 0, is_end=True)

    def following(self, key: CacheKey, num_tokens: int) -> bytes:
        return b""

    def insert(self, key: CacheKey, pages: IntArray) -> Inserted:
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

    def count_hit(self, handle: Handle) -> None:
        pass

    def evict(self, num_pages: int) -> IntArray:
        if num_pages:
            raise OutOfPages(f"{num_pages} pages to evict; nothing is cached")
        return NO_PAGES

    def forget(self, handle: Handle) -> IntArray:
        return NO_PAGES

    def forget_prefix(self, key: CacheKey) -> IntArray:
        return NO_PAGES

    def forget_pages(self, pages: IntArray) -> IntArray:
        return NO_PAGES

    def reset(self) -> IntArray:
        return NO_PAGES

    def drop(self) -> None:
        pass

    def key_of(self, handle: Handle) -> CacheKey:
        return CacheKey("", b"")

    def path_of(self, handle: Handle) -> Iterable[Any]:
        return ()

    def sequences(self) -> list[CacheKey]:
        return []

    def owned_pages(self) -> IntArray:
        return NO_PAGES

    def tops(self) -> Iterable[Any]:
        return ()

    def check(self) -> None:
        pass

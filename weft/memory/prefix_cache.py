"""The protocol of a prefix cache, and an implementation that caches nothing.

The cache owns the pages in it. It never evicts a page of a locked path. It evicts a page of a
pinned path only after the path has been unpinned, which happens when memory is needed (`pins.py`).
It knows keys and pages, never requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from weft.arrays import IntArray
from weft.memory.allocator import OutOfPages

TOKEN_BYTES = 4  # of one token in a key
Handle: TypeAlias = Any  # a position in the cache, opaque to users; None: nothing is cached

NO_PAGES = np.empty(0, dtype=np.int32)


def find_tokens(tokens: bytes, pattern: bytes, start: int = 0, end: int | None = None) -> int:
    """The first position in bytes, between `start` and `end`, at which a pattern of packed tokens
    stands at the beginning of a token; -1 if there is none."""
    at = tokens.find(pattern, start, end)
    while at % TOKEN_BYTES and at >= 0:
        at = tokens.find(pattern, at + 1, end)
    return at


def shared_len(tokens: bytes, start: int, end: int, key: bytes, step: int) -> int:
    """Bytes that `tokens[start:end]` and `key` begin with in common, in whole pieces of `step`
    bytes; all of them if one is the beginning of the other.

    Where the two differ, a binary search over the pieces finds it: a comparison of slices is one
    memcmp, whatever their length.

        0 ........ same ........ differ ........ length
        | equal    |   unknown   | not equal to the end |
    """
    length = min(len(key), end - start)
    # All of the key is the usual case; slicing it would copy it.
    beginning = key if length == len(key) else key[:length]
    if tokens[start : start + length] == beginning:
        return length
    same = 0
    differ = -(-length // step)  # also if the last piece is shorter
    while differ - same > 1:
        middle = (same + differ) // 2
        if tokens[start + same * step : start + middle * step] == key[same * step : middle * step]:
            same = middle
        else:
            differ = middle
    return same * step


class CacheKey(NamedTuple):
    """The part of a sequence that the cache compares. Namespaces never share.

    Python compares and slices packed bytes faster than any list or array. For text, the bytes are
    the token ids. In general, everything on which K and V of single tokens depend (as on an image
    instead of its tokens) must be in the bytes, and everything on which K and V of all tokens
    depend (an adapter, a salt) in the namespace.
    """

    namespace: str
    tokens: bytes  # TOKEN_BYTES for each token

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def first(self, num_tokens: int) -> CacheKey:
        """The key of the first tokens."""
        return CacheKey(self.namespace, self.tokens[: num_tokens * TOKEN_BYTES])


class Match(NamedTuple):
    """The longest cached prefix of a sequence, in whole pages."""

    handle: Handle  # end of the prefix; lock it to keep the prefix
    length: int  # in tokens
    pages: IntArray  # [length / page_size]; they belong to the cache


class Inserted(NamedTuple):
    """The result of offering a sequence to the cache."""

    handle: Handle  # end of the sequence in the cache
    length: int  # tokens of the sequence that are in the cache now
    # Tokens of the sequence that were in the cache before. The caller's own pages for these are
    # duplicates, which the caller may free.
    present: int


class CacheListener(Protocol):
    """Is notified of the changes of a cache. Handles have `key` (packed tokens) and `parent`.

    The top of a namespace is a handle with an empty key and the attribute `namespace`.
    """

    def inserted(self, leaf: Handle) -> None:
        """A new leaf was added below its parent."""
        ...

    def split(self, upper: Handle, lower: Handle) -> None:
        """`lower` was cut: the new `upper` has its beginning, and `lower`, its child, the rest."""
        ...

    def trimmed(self, leaf: Handle) -> None:
        """The end of a leaf was evicted."""
        ...

    def removed(self, leaf: Handle) -> None:
        """A leaf was evicted; its `parent` is still set."""
        ...

    def emptied(self) -> None:
        """The cache is empty now."""
        ...


class Location(NamedTuple):
    """The end of the cached prefix of a sequence."""

    handle: Handle
    length: int  # of the prefix, in bytes of the key
    is_end: bool  # whether the prefix ends at the end of the handle's piece; else inside


class PrefixCache(Protocol):
    page_size: int
    listeners: list[CacheListener]  # notified of each change, in this order
    shares: bool  # whether an inserted sequence can be matched
    evictable_pages: int  # cached, neither locked nor pinned
    pinned_pages: int  # cached, pinned and not locked
    protected_pages: int  # cached and locked
    total_evicted_pages: int  # since the start
    num_emptied: int  # number of times that everything was dropped

    def match(self, key: CacheKey) -> Match:
        """Find the longest cached prefix, and mark it as used now."""
        ...

    def peek(self, key: CacheKey) -> int:
        """Length in tokens of what `match` would find. Changes nothing."""
        ...

    def locate(self, key: CacheKey, end: int) -> Location:
        """The end of the cached prefix of the first `end` bytes of a key. Changes nothing."""
        ...

    def following(self, key: CacheKey, num_tokens: int) -> bytes:
        """The packed tokens, at most `num_tokens`, that follow those of `key` in the cache; the
        last tokens of `key` need not fill a page. Empty if there are none. If there are several
        continuations, the most recently used one. Does not count as a use."""
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
        """Protect like `lock`, but with a separate count, until it is unpinned as many times."""
        ...

    def unpin(self, handle: Handle) -> None: ...

    def unshared_pages(self, handle: Handle) -> int:
        """Pages that one `unlock` of the sequence that ends at `handle` would unprotect."""
        ...

    def count_hit(self, handle: Handle) -> None:
        """Count a request that begins with the sequence ending at `handle`. No decision uses
        this."""
        ...

    def evict(self, num_pages: int) -> IntArray:
        """Drop evictable pages, least recently used sequences first, from their ends.

        Returns the pages [num_pages]; they belong to the caller. Raises OutOfPages if there are
        fewer; then nothing has been dropped.
        """
        ...

    def cool(self, handle: Handle) -> None:
        """Evict the end of the sequence that ends at `handle` before all others, unless it is used
        again or another sequence continues after it."""
        ...

    def forget(self, handle: Handle) -> IntArray:
        """Drop the end of the sequence that ends at `handle`, up to the first page still in use.

        Pages are in use if they are locked or pinned, or if another sequence continues after them.
        Returns the dropped pages; they belong to the caller.
        """
        ...

    def forget_prefix(self, key: CacheKey) -> IntArray:
        """`forget` every sequence that begins with a key, in whole pages; if only a part of the key
        is cached, that part. Returns the dropped pages; they belong to the caller."""
        ...

    def forget_pages(self, pages: IntArray) -> IntArray:
        """`forget` every sequence that ends in a node with one of these pages. Returns the dropped
        pages; they belong to the caller."""
        ...

    def reset(self) -> IntArray:
        """Drop everything; nothing may be locked or pinned. The returned pages are the caller's."""
        ...

    def drop(self) -> None:
        """Drop everything, even if locked, without reading it. All handles become invalid.

        The caller knows the owners of the pages afterwards.
        """
        ...

    def key_of(self, handle: Handle) -> CacheKey:
        """The whole sequence that ends at `handle`."""
        ...

    def path_of(self, handle: Handle) -> Iterable[Any]:
        """The nodes from `handle` up to the first one below the top, for observation."""
        ...

    def sequences(self) -> list[CacheKey]:
        """All cached sequences that are not the beginning of another one, most recently used
        first."""
        ...

    def owned_pages(self) -> IntArray:
        """Every page that the cache owns, for the audit."""
        ...

    def tops(self) -> Iterable[Any]:
        """The top nodes, one for each namespace, for observation."""
        ...


@dataclass(eq=False)
class NoPrefixCache:
    """Caches nothing: every page stays with its request (SGLang: ChunkCache)."""

    page_size: int
    listeners: list[CacheListener] = field(default_factory=list)

    shares = False
    evictable_pages = 0
    pinned_pages = 0
    protected_pages = 0
    total_evicted_pages = 0
    num_emptied = 0

    def match(self, key: CacheKey) -> Match:
        return Match(None, 0, NO_PAGES)

    def peek(self, key: CacheKey) -> int:
        return 0

    def locate(self, key: CacheKey, end: int) -> Location:
        return Location(None, 0, is_end=True)

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

    def cool(self, handle: Handle) -> None:
        pass

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

"""The words of the prefix cache (`radix/cache.py`): keys, what a lookup or an insertion finds, and
who is notified of its changes."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from weft.arrays import IntArray

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

"""A sorted set of entries, stored in blocks, so that adding or removing an entry moves at most a
few hundred others.

    _blocks   [1 4 4] [6 7] [9 9 12]
    _lasts         4     7       12       searched for the block of an entry; the last entry of a
                                          block may have been removed
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

# The keys of a request, the most important first, followed by its arrival order: so no two entries
# are equal, and requests with equal keys are in order of arrival.
Entry: TypeAlias = tuple[Any, ...]

BLOCK_SIZE = 256
SHARE = 8  # if one in this many entries or more is new, all are sorted again


class Lane:
    """A set of entries, which are read in order."""

    __slots__ = ("_blocks", "_lasts", "_size")

    def __init__(self) -> None:
        self._blocks: list[list[Entry]] = []
        self._lasts: list[Entry] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Entry]:
        """In order. Lazy: entries added or removed in the meantime may or may not be yielded."""
        for block in self._blocks[:]:
            yield from block[:]

    def first(self) -> Entry | None:
        if not self._blocks:
            return None
        return self._blocks[0][0]

    def within(self, low: Entry, end: Entry) -> Iterator[Entry]:
        """The entries from `low` up to but not including `end`, in order. Lazy."""
        number = bisect_left(self._lasts, low)
        for block in self._blocks[number:]:
            first = bisect_left(block, low)
            last = bisect_left(block, end)
            yield from block[first:last]
            if last < len(block):
                return

    def add(self, entries: Iterable[Entry]) -> None:
        """Add entries that are not in the lane."""
        new = list(entries)
        if len(new) * SHARE < self._size:
            for entry in new:
                self._add(entry)
        else:
            self._fill(sorted([*self, *new]))

    def remove(self, entry: Entry) -> None:
        """Remove an entry that is in the lane."""
        number = bisect_left(self._lasts, entry)
        block = self._blocks[number]
        entry_at = bisect_left(block, entry)
        assert block[entry_at] == entry, "an entry is not where it belongs"
        del block[entry_at]
        self._size -= 1
        if not block:
            del self._blocks[number]
            del self._lasts[number]

    def _add(self, entry: Entry) -> None:
        number = min(bisect_left(self._lasts, entry), len(self._blocks) - 1)
        block = self._blocks[number]
        insort(block, entry)
        self._size += 1
        if len(block) > 2 * BLOCK_SIZE:
            self._blocks[number : number + 1] = block[:BLOCK_SIZE], block[BLOCK_SIZE:]
            self._lasts.insert(number, block[BLOCK_SIZE - 1])
        else:
            self._lasts[number] = block[-1]

    def _fill(self, entries: list[Entry]) -> None:
        starts = range(0, len(entries), BLOCK_SIZE)
        self._blocks = [entries[start : start + BLOCK_SIZE] for start in starts]
        self._lasts = [block[-1] for block in self._blocks]
        self._size = len(entries)

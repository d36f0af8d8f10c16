"""The numbers of the waiting requests that never ran, in columns: one line each, in the order of arrival.

A policy's order over ten thousand requests is then a few vector operations, and only those that are looked at are
touched one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from weft.arrays import BoolArray, IntArray, LongArray
from weft.scheduler.request import Request

DoubleArray: TypeAlias = NDArray[np.float64]

NUM_HEAD = 64  # the first so many are found without sorting the rest
COLUMNS = (
    "is_used",
    "arrival_order",
    "arrival_s",
    "fill_len",
    "cached_len",
    "max_len",
    "priority",
    "tag",
)


class Notes(NamedTuple):
    cached_len: LongArray  # [n]
    tag: LongArray  # [n]


class WaitingTable:
    """Lines of requests that have left stay empty until there are too many of them."""

    def __init__(self) -> None:
        size = 64
        self.is_used: BoolArray = np.zeros(size, dtype=np.bool_)
        self.arrival_order: LongArray = np.zeros(size, dtype=np.int64)  # number of the request
        self.arrival_s: DoubleArray = np.zeros(size, dtype=np.float64)  # rises along the lines
        self.fill_len: LongArray = np.zeros(size, dtype=np.int64)  # tokens of the prompt
        self.cached_len: LongArray = np.zeros(
            size, dtype=np.int64
        )  # of these in the cache, if the policy reads it
        self.max_len: LongArray = np.zeros(size, dtype=np.int64)
        self.priority: LongArray = np.zeros(size, dtype=np.int64)
        self.tag: LongArray = np.zeros(size, dtype=np.int64)  # what the policy has given it
        self._requests: list[Request | None] = [None] * size
        self._line: dict[int, int] = {}  # by number
        self._end = 0  # lines from here on were never used

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        return (request for request in self._requests[: self._end] if request is not None)

    def __contains__(self, request: Request) -> bool:
        return request.arrival_order in self._line

    def append(self, request: Request) -> None:
        if self._end == len(self.is_used):
            self._make_room()
        line = self._end
        # the line counts only when every number has its place: one that a column cannot hold leaves no trace
        self.arrival_order[line] = request.arrival_order
        self.arrival_s[line] = request.arrival_s
        self.fill_len[line] = request.fill_len
        self.cached_len[line] = 0
        self.max_len[line] = request.max_len
        self.priority[line] = request.priority
        self._requests[line] = request
        self._line[request.arrival_order] = line
        self.is_used[line] = True
        self._end += 1

    def remove(self, request: Request) -> None:
        line = self._line.pop(request.arrival_order)
        self._requests[line] = None
        self.is_used[line] = False

    def set_cached_len(self, arrival_order: int, length: int) -> None:
        self.cached_len[self._line[arrival_order]] = length

    def set_tag(self, arrival_order: int, tag: int) -> None:
        self.tag[self._line[arrival_order]] = tag

    def notes(self) -> Notes:
        """What policies have written beside the requests, for `restore`."""
        return Notes(self.cached_len.copy(), self.tag.copy())

    def restore(self, notes: Notes) -> None:
        """As it was when the notes were taken. No request has come or gone since."""
        self.cached_len[:] = notes.cached_len
        self.tag[:] = notes.tag

    def lines(self) -> IntArray:
        """The lines in use [n], in the order of arrival."""
        return np.flatnonzero(self.is_used[: self._end]).astype(np.int32)

    def at(self, line: int) -> Request:
        request = self._requests[line]
        assert request is not None
        return request

    def numbered(self, arrival_order: int) -> Request:
        return self.at(self._line[arrival_order])

    def lowest_first(self, lines: IntArray, key: DoubleArray | LongArray) -> Iterator[Request]:
        """The requests of `lines` [n] by `key` [n], equal ones as they came. Sorts no more than is looked at."""
        if len(lines) > 2 * NUM_HEAD:
            is_head = key <= np.partition(key, NUM_HEAD)[NUM_HEAD]
            yield from self._sorted(lines[is_head], key[is_head])
            lines, key = lines[~is_head], key[~is_head]
        yield from self._sorted(lines, key)

    def _sorted(self, lines: IntArray, key: DoubleArray | LongArray) -> Iterator[Request]:
        for line in lines[np.argsort(key, kind="stable")].tolist():
            yield self.at(line)

    def _make_room(self) -> None:
        """Close the gaps; double the table if these are few."""
        lines = self.lines()
        n, size = len(lines), len(self.is_used)
        room = size if n <= size // 2 else 2 * size
        columns = {}
        for name in COLUMNS:
            column = getattr(self, name)
            packed = np.zeros(room, dtype=column.dtype)
            packed[:n] = column[lines]
            columns[name] = packed
        for name, packed in columns.items():  # when there was memory for all of them
            setattr(self, name, packed)
        self._requests = [self._requests[line] for line in lines.tolist()] + [None] * (room - n)
        self._line = dict(zip(self.arrival_order[:n].tolist(), range(n), strict=True))
        self._end = n

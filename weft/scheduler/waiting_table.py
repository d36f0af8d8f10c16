"""The numbers of the waiting requests that never ran, in columns. Each request has one index, in
order of arrival. The table knows no policy; a policy may store one number per request in `tag`.

With columns, ordering ten thousand requests takes a few vector operations, and Python touches only
the requests that the scheduler looks at.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from weft.arrays import BoolArray, LongArray
from weft.scheduler.request import Request

DoubleArray: TypeAlias = NDArray[np.float64]

EVERYBODY = 2**62  # above every arrival order
NUM_HEAD = 64  # number of requests that are found without sorting the rest
SAMPLE_SIZE = 512  # size of the sample of keys from which a low key is chosen
SOME = 4_096  # block of requests to read at once where a few may be enough
MAX_SPLICED = 8  # up to this many departed requests are removed from the list one by one
FIRST_SIZE = 64
COLUMNS = (
    "arrival_order",
    "arrival_s",
    "fill_len",
    "cached_len",
    "max_len",
    "priority",
    "ttft_ms",
    "timeout_ms",
    "due_s",
    "tag",
)


class PolicyColumns(NamedTuple):
    """Copies of the columns that a policy writes."""

    cached_len: LongArray  # [n]
    tag: LongArray  # [n]


class UsedIndices:
    """Which indices of a table are in use.

    flags   1 0 1 1 0 1 | . .       end = 6
    """

    def __init__(self) -> None:
        self.flags: BoolArray = np.zeros(FIRST_SIZE, dtype=np.bool_)
        self.end = 0  # indices from here on are unused
        # The last result of `listed`: the indices that were in use below `_listed_end`. Those that
        # have become unused since then are in `_gone`.
        self._listed: LongArray = np.zeros(0, dtype=np.int64)
        self._listed_end = 0
        self._gone: list[int] = []

    def discard(self, index: int) -> None:
        self.flags[index] = False
        if index < self._listed_end:
            self._gone.append(index)

    def listed(self) -> LongArray:
        """The indices in use [n], in order. The caller must not write to the array.

        They have numpy's own index type, which numpy need not convert for each column. Few requests
        come and go between two steps, so the list is updated instead of searched again (of 100,000:
        25 us instead of 110).
        """
        if len(self._gone) > MAX_SPLICED:
            self._listed = np.flatnonzero(self.flags[: self.end])
        elif self._gone or self._listed_end < self.end:
            # Copied once, however many have gone; not at all if none has gone or come.
            pieces = []
            begin = 0
            gone = np.array(self._gone, dtype=np.int64)
            for at in np.sort(self._listed.searchsorted(gone)).tolist():
                pieces.append(self._listed[begin:at])
                begin = at + 1
            pieces.append(self._listed[begin:])
            new = np.flatnonzero(self.flags[self._listed_end : self.end])
            pieces.append(new + self._listed_end)
            self._listed = np.concatenate(pieces)
        self._gone = []
        self._listed_end = self.end
        return self._listed

    def marks(self, indices: LongArray) -> BoolArray:
        """Whether each index of the table is one of `indices` [n]."""
        is_one: BoolArray = np.zeros(len(self.flags), dtype=np.bool_)
        is_one[indices] = True
        return is_one

    def pack(self, num_used: int, size: int) -> None:
        """The table has been packed: its first `num_used` indices are in use, of `size`."""
        self.flags = np.zeros(size, dtype=np.bool_)
        self.flags[:num_used] = True
        self.end = num_used
        self._listed = np.arange(num_used)
        self._listed_end = num_used
        self._gone = []


class WaitingChanges:
    """Which requests came, left, or got another number in a column, by arrival order."""

    def __init__(self) -> None:
        # Number of the last change of each request; the latest change is last.
        self._numbers: dict[int, int] = {}
        self.num = 0
        # how often changes of departed requests were forgotten
        self.num_forgotten = 0

    def note(self, arrival_order: int) -> None:
        # Removed first, so that it becomes the last entry.
        self._numbers.pop(arrival_order, None)
        self._numbers[arrival_order] = self.num
        self.num += 1

    def since(self, number: int) -> list[int]:
        """The arrival orders of the requests that changed after change `number`, latest first.
        Requests that left may be missing after `num_forgotten` has risen."""
        found = []
        for arrival_order in reversed(self._numbers):
            if self._numbers[arrival_order] < number:
                break
            found.append(arrival_order)
        return found

    def forget(self, waiting: Container[int]) -> None:
        """Forget the requests that do not wait any more."""
        self._numbers = {one: self._numbers[one] for one in self._numbers if one in waiting}
        self.num_forgotten += 1


class WaitingTable:
    """The index of a request that has left stays empty until the table is packed.

    arrival_order  3 . 5 6 . 9 | . .       arrival_order and arrival_s rise
    """

    def __init__(self) -> None:
        self.arrival_order: LongArray = np.zeros(FIRST_SIZE, dtype=np.int64)
        self.arrival_s: DoubleArray = np.zeros(FIRST_SIZE, dtype=np.float64)
        self.fill_len: LongArray = np.zeros(FIRST_SIZE, dtype=np.int64)  # tokens of the prompt
        # Cached tokens of the prompt, if the policy reads them.
        self.cached_len: LongArray = np.zeros(FIRST_SIZE, dtype=np.int64)
        self.max_len: LongArray = np.zeros(FIRST_SIZE, dtype=np.int64)
        self.priority: LongArray = np.zeros(FIRST_SIZE, dtype=np.int64)
        # Time allowed from arrival to the first token, and to the end; 0: no limit.
        self.ttft_ms: LongArray = np.zeros(FIRST_SIZE, dtype=np.int64)
        self.timeout_ms: LongArray = np.zeros(FIRST_SIZE, dtype=np.int64)
        # When the first token is due, or else the end; infinite without a limit.
        self.due_s: DoubleArray = np.zeros(FIRST_SIZE, dtype=np.float64)
        # one number that the policy may write
        self.tag: LongArray = np.zeros(FIRST_SIZE, dtype=np.int64)
        self._requests: list[Request | None] = [None] * FIRST_SIZE
        self._index: dict[int, int] = {}  # by arrival order
        self.used = UsedIndices()
        self.changes = WaitingChanges()

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[Request]:
        for request in self._requests[: self.used.end]:
            if request is not None:
                yield request

    def __contains__(self, request: Request) -> bool:
        return request.spec.arrival_order in self._index

    def append(self, request: Request) -> None:
        if self.used.end == len(self.used.flags):
            self._make_room()
        index = self.used.end
        arrival_order = request.spec.arrival_order
        # The index becomes valid only after every number is stored, so a number that does not fit
        # its column leaves no trace.
        self.arrival_order[index] = arrival_order
        self.arrival_s[index] = request.spec.arrival_s
        self.fill_len[index] = request.fill_len
        self.cached_len[index] = 0
        self.max_len[index] = request.max_len
        self.priority[index] = request.message.priority
        self.ttft_ms[index] = request.message.ttft_ms
        self.timeout_ms[index] = request.message.timeout_ms
        self.due_s[index] = math.inf
        allowed_ms = request.message.ttft_ms or request.message.timeout_ms
        if allowed_ms:
            self.due_s[index] = request.spec.arrival_s + allowed_ms / 1_000
        self._requests[index] = request
        self._index[arrival_order] = index
        self.used.flags[index] = True
        self.used.end = index + 1
        self.changes.note(arrival_order)

    def discard(self, request: Request) -> bool:
        """Remove a request. Returns whether it was in the table."""
        arrival_order = request.spec.arrival_order
        index = self._index.pop(arrival_order, None)
        if index is None:
            return False
        self._requests[index] = None
        self.used.discard(index)
        self.changes.note(arrival_order)
        return True

    def set_cached_len(self, arrival_order: int, length: int) -> None:
        self.cached_len[self._index[arrival_order]] = length
        self.changes.note(arrival_order)

    def set_tag(self, arrival_order: int, tag: int) -> None:
        self.tag[self._index[arrival_order]] = tag

    def tags(self) -> dict[int, int]:
        """The tag of each request, by its arrival order."""
        indices = self.indices()
        orders = self.arrival_order[indices].tolist()
        return dict(zip(orders, self.tag[indices].tolist(), strict=True))

    def policy_columns(self) -> PolicyColumns:
        """Copies of the numbers that policies have written, for `restore`."""
        return PolicyColumns(self.cached_len.copy(), self.tag.copy())

    def restore(self, columns: PolicyColumns) -> None:
        """Write them back. No request has come or gone since `policy_columns`."""
        self.cached_len[:] = columns.cached_len
        self.tag[:] = columns.tag

    def indices(self) -> LongArray:
        """The indices in use [n], in order of arrival. The caller must not write to the array."""
        return self.used.listed()

    def indices_before(self, end: int) -> LongArray:
        """The indices of the requests whose arrival order is below `end`."""
        indices = self.indices()
        if end == EVERYBODY:
            return indices
        border = np.searchsorted(self.arrival_order[: self.used.end], end)
        return indices[: int(np.searchsorted(indices, border))]

    def came_by(self, time_s: float, end: int = EVERYBODY) -> Iterator[Request]:
        """The requests that arrived at `time_s` or earlier, with an arrival order below `end`.

        In order of arrival. Lazy: the caller may stop at any request, and later ones are not read.
        """
        last = int(np.searchsorted(self.arrival_s[: self.used.end], time_s, side="right"))
        if end != EVERYBODY:
            last = min(last, int(np.searchsorted(self.arrival_order[: self.used.end], end)))
        for first in range(0, last, SOME):
            is_used = self.used.flags[first : min(first + SOME, last)]
            for index in np.flatnonzero(is_used).tolist():
                request = self._requests[first + index]
                if request is not None:
                    yield request

    def end_by(self, time_s: float) -> int:
        """An arrival order above those of all requests that arrived at `time_s` or earlier."""
        border = int(np.searchsorted(self.arrival_s[: self.used.end], time_s, side="right"))
        if border == self.used.end:
            return EVERYBODY
        return int(self.arrival_order[border])

    def first(self) -> Request | None:
        """The oldest request; None if there is none."""
        if not self._index:
            return None
        return self.request_at(int(np.argmax(self.used.flags)))

    def request_at(self, index: int) -> Request:
        request = self._requests[index]
        assert request is not None
        return request

    def index_by_arrival(self, arrival_order: int) -> int:
        return self._index[arrival_order]

    def find(self, arrival_order: int) -> Request | None:
        """The request with this arrival order, if it waits."""
        index = self._index.get(arrival_order)
        return None if index is None else self._requests[index]

    def waits(self, arrival_order: int) -> bool:
        return arrival_order in self._index

    def indices_of(self, arrivals: Sequence[int]) -> LongArray:
        """The index [n] of each of `arrivals` [n]. All of them must be waiting."""
        return np.array([self._index[arrival] for arrival in arrivals], dtype=np.int64)

    def index_of(self, request: Request) -> int:
        """The index of a request that must be waiting."""
        return self._index[request.spec.arrival_order]

    def lowest_first(self, indices: LongArray, key: DoubleArray | LongArray) -> Iterator[Request]:
        """The requests at `indices` [n], ordered by `key` [n], and by arrival where keys are equal.

        A few lowest keys are sorted first, and the rest only if the caller reads so far.
        """
        if len(indices) > 2 * SAMPLE_SIZE:
            border = low_border(key)
            is_lower = np.flatnonzero(key < border)
            yield from self._sorted(indices[is_lower], key[is_lower])
            # Keys equal to the border may be all keys. They are in order of arrival and need no
            # sorting.
            for first in range(0, len(key), SOME):
                is_equal = np.flatnonzero(key[first : first + SOME] == border)
                yield from map(self.request_at, indices[first + is_equal].tolist())
            is_higher = np.flatnonzero(key > border)
            indices = indices[is_higher]
            key = key[is_higher]
        yield from self._sorted(indices, key)

    def _sorted(self, indices: LongArray, key: DoubleArray | LongArray) -> Iterator[Request]:
        order = np.argsort(key, kind="stable")  # stable: equal keys stay in order of arrival
        for index in indices[order].tolist():
            yield self.request_at(index)

    def _make_room(self) -> None:
        """Remove empty indices; double the table if more than half of it is used."""
        indices = self.used.listed()
        num_used = len(indices)
        size = len(self.used.flags)
        new_size = size
        if num_used > size // 2:
            new_size = 2 * size
        columns = {}
        for name in COLUMNS:
            column = getattr(self, name)
            packed = np.zeros(new_size, dtype=column.dtype)
            packed[:num_used] = column[indices]
            columns[name] = packed
        # Only now, because the memory for all columns is there.
        for name, packed in columns.items():
            setattr(self, name, packed)
        requests = [self._requests[index] for index in indices.tolist()]
        empty = [None] * (new_size - num_used)
        self._requests = requests + empty
        self.used.pack(num_used, new_size)
        self._index = {}
        orders = self.arrival_order[:num_used].tolist()
        for index, arrival_order in enumerate(orders):
            self._index[arrival_order] = index
        self.changes.forget(self._index)


def low_border(key: DoubleArray | LongArray) -> np.float64 | np.int64:
    """A low key out of many keys [n]: the second lowest of a sample; about 0.4 % of all are
    below."""
    sample = key[:: len(key) // SAMPLE_SIZE]
    border: np.float64 | np.int64 = np.partition(sample, 1)[1]
    return border


def chosen(indices: LongArray, is_chosen: BoolArray) -> LongArray:
    """Those of `indices` [n] that are chosen. If all are, the array itself and not a copy."""
    if is_chosen.all():
        return indices
    return indices[is_chosen]

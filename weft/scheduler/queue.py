"""Requests that wait, in the order of their arrival; retracted ones before all others."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from weft.scheduler.request import Request


class WaitingQueue:
    def __init__(self) -> None:
        self._new: dict[int, Request] = {}  # by id; a dict keeps the order and drops from the middle in O(1)
        self._resumed: list[Request] = []  # retracted: few, sorted by arrival

    def __len__(self) -> int:
        return len(self._new) + len(self._resumed)

    def __iter__(self) -> Iterator[Request]:
        yield from self._resumed
        yield from self._new.values()

    def append(self, request: Request) -> None:
        self._new[request.id] = request

    def resume(self, request: Request) -> None:
        """Take a retracted request back. It keeps the place that its arrival gave it, before all that never ran."""
        insort(self._resumed, request, key=lambda other: other.arrival)

    def remove(self, request: Request) -> None:
        if self._new.pop(request.id, None) is None:
            self._resumed.remove(request)

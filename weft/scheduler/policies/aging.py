"""Turns of overdue requests: no policy lets one wait for ever."""

from __future__ import annotations

from collections.abc import Iterator

from weft.scheduler.policies.protocol import TURNS
from weft.scheduler.request import Request


class AgingTurns:
    """Gives every fourth admission to the oldest overdue request, so that no policy starves one.

    From the moment at which a request becomes overdue:

            f f f O f f f O f f f O        f: the policy's next request, O: the oldest overdue one

    A request with k older ones in the queue gets the O of turn k + 1 at the latest, that is, after
    at most TURNS * (k + 1) admissions of requests that never ran, whatever arrives later.
    """

    def __init__(self) -> None:
        self.num_since = 0  # admissions since the last turn of an overdue request
        # ids of the requests to which the last order gave such a turn
        self._turns: set[int] = set()

    def interleave(self, overdue: Iterator[Request], fresh: Iterator[Request]) -> Iterator[Request]:
        """`fresh`, with the next of `overdue`, oldest first, at every fourth position."""
        seen: set[int] = set()
        turns: set[int] = set()
        self._turns = turns
        num_since = self.num_since
        for request in fresh:
            if num_since >= TURNS - 1:
                oldest = _first_unseen(overdue, seen)
                if oldest is not None:
                    seen.add(oldest.id)
                    turns.add(oldest.id)
                    num_since = 0
                    yield oldest
            if request.id not in seen:
                seen.add(request.id)
                num_since += 1
                yield request

    def forget_turns(self) -> None:
        """The next order is made by another policy."""
        self._turns = set()

    def admitted(self, request: Request, *, counts: bool) -> None:
        """A request got a row. `counts`: in its turn, and not because it was retracted."""
        if request.id in self._turns:
            self.num_since = 0
        elif counts:
            self.num_since += 1


def _first_unseen(requests: Iterator[Request], seen: set[int]) -> Request | None:
    for request in requests:
        if request.id not in seen:
            return request
    return None

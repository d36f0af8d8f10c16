"""Policies that are no part of weft: good ones, and ones with every fault there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from weft.arrays import IntArray, LongArray
from weft.scheduler.policies.protocol import KeyPolicy, Policy, PolicyContext
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import WaitingTable


class Latest(KeyPolicy):
    """Last come, first served."""

    def key(self, table: WaitingTable, indices: LongArray, now: float) -> LongArray:
        return -table.arrival_order[indices]


class ByTag(Policy):
    """The shortest prompt first, by the number that it has written beside each request."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.follower = self
        self.heard: list[str] = []

    def arrived(self, request: Request) -> int:
        self.heard.append("arrived")
        return request.fill_len

    def dropped(self, request: Request) -> None:
        self.heard.append("dropped")

    def passed_over(self, request: Request) -> None:
        self.heard.append("passed over")

    def admitted(self, request: Request) -> None:
        self.heard.append("admitted")

    def left(self, request: Request) -> None:
        self.heard.append("left")

    def order(self, table: WaitingTable, indices: LongArray, now: float) -> Iterator[Request]:
        return table.lowest_first(indices, table.tag[indices])


class Unmakeable(Policy):
    def __init__(self, context: PolicyContext) -> None:
        raise RuntimeError("no luck")


class Raises(KeyPolicy):
    def key(self, table: WaitingTable, indices: LongArray, now: float) -> Any:
        raise ZeroDivisionError("in my policy")


class TooShort(KeyPolicy):
    def key(self, table: WaitingTable, indices: LongArray, now: float) -> Any:
        return np.zeros(max(len(indices) - 1, 0))


class NotANumber(KeyPolicy):
    def key(self, table: WaitingTable, indices: LongArray, now: float) -> Any:
        return np.full(len(indices), np.nan)


class Words(KeyPolicy):
    def key(self, table: WaitingTable, indices: LongArray, now: float) -> Any:
        return np.array(["first"] * len(indices))


class Nobody(Policy):
    def order(self, table: WaitingTable, indices: LongArray, now: float) -> Iterator[Request]:
        return iter(())


class Nothing(Policy):
    def order(self, table: WaitingTable, indices: LongArray, now: float) -> Any:
        return None


class Twice(Policy):
    def order(self, table: WaitingTable, indices: LongArray, now: float) -> Iterator[Request]:
        for request in super().order(table, indices, now):
            yield request
            yield request


class Strange(Policy):
    def order(self, table: WaitingTable, indices: LongArray, now: float) -> Any:
        return iter([7])


class RaisesLater(Policy):
    def order(self, table: WaitingTable, indices: LongArray, now: float) -> Iterator[Request]:
        yield table.request_at(int(indices[-1]))
        raise KeyError("after the first")


class Gone(Policy):
    """Names requests that have left."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.first: Request | None = None

    def order(self, table: WaitingTable, indices: LongArray, now: float) -> Iterator[Request]:
        if self.first is None:
            self.first = table.request_at(int(indices[0]))
        yield self.first


class Deaf(Policy):
    """Its account raises."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.follower = self

    def __getattr__(self, name: str) -> Any:
        if name in ("arrived", "dropped", "passed_over", "admitted", "left"):
            raise LookupError(name)
        raise AttributeError(name)


class WrongClasses(Policy):
    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.classes = self
        self.displacement = self

    def rank(self, request: Request) -> Any:
        return "high"

    def far_below(self, waiting: Request, rows: IntArray) -> Any:
        return [1, 2, 3]

    def displaced(self, table: WaitingTable, indices: LongArray, newcomer: Request) -> Any:
        return 7


class NoPolicy:
    pass


FAULTY = (
    "Unmakeable",
    "Raises",
    "TooShort",
    "NotANumber",
    "Words",
    "Nobody",
    "Nothing",
    "Twice",
    "Strange",
    "RaisesLater",
    "Gone",
    "Deaf",
    "WrongClasses",
)

"""The requests that wait for their models, and those who have asked for a load or an unload."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from weft.server.errors import ApiError


@dataclass(eq=False)
class Waiter:
    rid: str
    model: str
    came_s: float
    may_begin: asyncio.Future[None]
    is_early: bool = False  # the files of its model are still being read


class LoadLine:
    """The waiting requests of each model, in the order in which they came."""

    def __init__(self) -> None:
        self._waiters: dict[str, deque[Waiter]] = defaultdict(deque)
        self._early: list[Waiter] = []
        self._askers: dict[str, list[asyncio.Future[None]]] = defaultdict(list)
        self.num_waiting = 0

    def __iter__(self) -> Iterator[Waiter]:
        for waiters in self._waiters.values():
            yield from waiters
        yield from self._early

    def num_for(self, model: str) -> int:
        return len(self._waiters[model])

    def require_room(self, most: int) -> None:
        """Raise `ApiError` 503 if `most` requests wait already."""
        if self.num_waiting >= most:
            message = f"{self.num_waiting:,} requests wait for models to be loaded already"
            raise ApiError(503, message, headers={"retry-after": "5"}, limit="max_load_waiting")

    def add(self, model: str, rid: str, now_s: float) -> Waiter:
        waiter = Waiter(rid, model, now_s, asyncio.get_running_loop().create_future())
        self._waiters[model].append(waiter)
        self.num_waiting += 1
        return waiter

    @contextmanager
    def early(self, model: str, rid: str, now_s: float) -> Iterator[None]:
        """Let a request be in the line while its model becomes known. Raises `ApiError` at the end
        if it was aborted meanwhile."""
        may_begin: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = Waiter(rid, model, now_s, may_begin, is_early=True)
        self._early.append(waiter)
        self.num_waiting += 1
        aborted: BaseException | None = None
        try:
            yield
        finally:
            if may_begin.done():
                aborted = may_begin.exception()
            else:
                self.remove(waiter)
        if aborted is not None:
            raise aborted

    def remove(self, waiter: Waiter) -> None:
        if waiter.is_early:
            self._early.remove(waiter)
        else:
            self._waiters[waiter.model].remove(waiter)
        self.num_waiting -= 1

    def abort(self, names: Collection[str]) -> list[Waiter]:
        """End those with these names, or all if there are none. Returns them."""
        chosen = [one for one in self if not names or one.rid in names]
        for waiter in chosen:
            self.remove(waiter)
            message = (
                f"the request was aborted while it waited for the model {waiter.model!r} to be "
                "loaded"
            )
            if not waiter.may_begin.done():
                waiter.may_begin.set_exception(ApiError(400, message, code="request_aborted"))
        return chosen

    def begin(self, model: str, num: int) -> list[Waiter]:
        """Let the first `num` requests of a model begin."""
        begun = [self._waiters[model].popleft() for _ in range(num)]
        self.num_waiting -= num
        for waiter in begun:
            if not waiter.may_begin.done():
                waiter.may_begin.set_result(None)
        return begun

    def fail(self, model: str, error: Exception) -> None:
        """End all that wait for a model, with this error."""
        for waiter in self._waiters.pop(model, ()):
            self.num_waiting -= 1
            if not waiter.may_begin.done():
                waiter.may_begin.set_exception(error)
        self.answer(model, error)

    # ---- loads and unloads that somebody has asked for

    async def answered(self, model: str) -> None:
        """Wait until the model is loaded, or unloaded; raises the error of a load that fails."""
        asker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._askers[model].append(asker)
        await asker

    def answer(self, model: str, error: Exception | None = None) -> None:
        for asker in self._askers.pop(model, ()):
            if asker.done():
                continue
            if error is None:
                asker.set_result(None)
            else:
                asker.set_exception(error)

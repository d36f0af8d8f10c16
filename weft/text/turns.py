"""A fair queue for the threads and processes of the front: tokenizing, templates, bodies.

Tenants take turns, however many requests each has; the requests of one tenant keep their order.
Long work never takes the last slot, so short work does not wait until long work ends. The time of
waiting has its own limit and does not count as work. Knows nothing of the work itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from weft.config.rotation import Rotation
from weft.observe.request_context import tenant

T = TypeVar("T")
WAIT_S = 10.0
STOPPING = "the server is shutting down"


class Busy(Exception):
    """No slot became free in time. The message is for the user, who may try again."""


class _Waiter(NamedTuple):
    granted: asyncio.Future[None]
    is_long: bool


class Turns:
    """At most `num_slots` callers hold a slot at a time. For one event loop."""

    def __init__(self, num_slots: int, what: str, *, wait_s: float = WAIT_S) -> None:
        """Requests wait at most `wait_s`. `what` names the resource in the message to the user."""
        self._num_free = num_slots
        self._num_free_long = max(num_slots - 1, 1)
        self._what = what
        self._wait_s = wait_s
        self._waiting = Rotation[_Waiter]()

    async def take(self, *, is_long: bool = False) -> None:
        """Wait for a slot, which the caller must give back. Raises `Busy`."""
        waiter = _Waiter(asyncio.get_running_loop().create_future(), is_long)
        name = tenant()
        self._waiting.put(name, waiter, is_long=is_long)
        self._grant()
        if waiter.granted.done():
            return
        try:
            await asyncio.wait({waiter.granted}, timeout=self._wait_s)
        except asyncio.CancelledError:
            # The slot may have been granted at the same moment.
            if not self._waiting.remove(name, waiter):
                self.give_back(is_long=is_long)
            raise
        if self._waiting.remove(name, waiter):
            raise Busy(f"{self._what} is overloaded; try again later")

    def give_back(self, *, is_long: bool = False) -> None:
        self._num_free += 1
        self._num_free_long += is_long
        self._grant()

    def _grant(self) -> None:
        while self._num_free:
            waiter = self._waiting.take(with_long=self._num_free_long > 0)
            if waiter is None:
                return
            self._num_free -= 1
            self._num_free_long -= waiter.is_long
            waiter.granted.set_result(None)


class Stoppable:
    """Work that can be stopped for all who wait for it. For one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_stopped = False

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. It ends with the caller, and at `stop`: then `Busy` is raised, as
        for all later work."""
        if self._is_stopped:
            work.close()
            raise Busy(STOPPING)
        task = asyncio.create_task(work)
        self._tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if self._is_stopped and own is not None and not own.cancelling():
                raise Busy(STOPPING) from None
            raise
        finally:
            self._tasks.discard(task)
            # An exception of the task refers to this frame, which would refer to the task.
            del task

    def stop(self) -> None:
        self._is_stopped = True
        for task in self._tasks:
            task.cancel()


class Workers:
    """Threads that tenants use in turns."""

    def __init__(self, num_threads: int, what: str, *, wait_s: float = WAIT_S) -> None:
        self._num_threads = num_threads
        self._what = what
        self._turns = Turns(num_threads, what, wait_s=wait_s)
        self._threads = self._new_threads()
        self._is_closed = False

    async def run(self, work: Callable[[], T], *, is_long: bool = False) -> T:
        """Run `work` in a thread. Returns what it returns; raises `Busy`, also after `close`, or
        what `work` raises."""
        await self._turns.take(is_long=is_long)
        if self._is_closed:
            self._turns.give_back(is_long=is_long)
            raise Busy(STOPPING)
        # No local variable holds the future: it and an exception of the work would refer to each
        # other, and keep all objects of the work alive until the garbage collector runs.
        return await asyncio.wrap_future(self._begun(work, is_long))

    def rest(self) -> None:
        """End the threads, each as soon as its work is done. Later work starts others."""
        self._threads.shutdown(wait=False)
        self._threads = self._new_threads()

    def close(self) -> None:
        """End the threads, each as soon as its work is done. Does not wait."""
        self._is_closed = True
        self._threads.shutdown(wait=False)

    def _new_threads(self) -> ThreadPoolExecutor:
        name = self._what.replace(" ", "-")
        return ThreadPoolExecutor(self._num_threads, thread_name_prefix=name)

    def _begun(self, work: Callable[[], T], is_long: bool) -> Future[T]:
        """Start the work. Its thread gives the slot back when the work is done, because the
        request may have been cancelled before."""
        turns = self._turns
        loop = asyncio.get_running_loop()

        def ended(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lambda: turns.give_back(is_long=is_long))

        future = self._threads.submit(work)
        future.add_done_callback(ended)
        return future

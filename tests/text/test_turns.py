"""Threads that are taken in turns."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any

import pytest

from weft.observe.request_context import RequestContext, current
from weft.text.turns import Busy, Turns, Workers


def go(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


async def settle() -> None:
    """Until every task that can go on has done so."""
    for _ in range(10):
        await asyncio.sleep(0)


def of(tenant: str, work: Awaitable[None]) -> asyncio.Task[None]:
    async def run() -> None:
        current.set(RequestContext("r", 0.0, tenant=tenant))
        await work

    return asyncio.create_task(run())


def test_tenants_take_turns() -> None:
    async def main() -> None:
        turns = Turns(1, "the test")
        order = []
        await turns.take()

        async def one(name: str) -> None:
            await turns.take()
            order.append(name)
            turns.give_back()

        tasks = [of(name[0], one(name)) for name in ("a0", "a1", "a2", "b0", "c0")]
        await settle()
        turns.give_back()
        await asyncio.gather(*tasks)
        assert order == ["a0", "b0", "c0", "a1", "a2"]

    go(main)


def test_long_work_leaves_a_place_to_short_work() -> None:
    async def main() -> None:
        turns = Turns(3, "the test")
        long = [asyncio.create_task(turns.take(is_long=True)) for _ in range(4)]
        await settle()
        assert [task.done() for task in long] == [True, True, False, False]
        await turns.take()  # at once
        turns.give_back()
        turns.give_back(is_long=True)
        await settle()
        assert [task.done() for task in long] == [True, True, True, False]
        turns.give_back(is_long=True)
        await long[3]

    go(main)


def test_a_task_that_waited_too_long_is_asked_to_retry_and_takes_no_thread() -> None:
    async def main() -> None:
        turns = Turns(1, "the test", wait_s=0.0)
        await turns.take()
        with pytest.raises(Busy, match="the test is overloaded"):
            await turns.take()
        turns.give_back()
        await turns.take()

    go(main)


def test_a_task_that_leaves_when_its_turn_comes_passes_it_on() -> None:
    async def main() -> None:
        turns = Turns(1, "the test")
        await turns.take()
        leaves = asyncio.create_task(turns.take())
        stays = asyncio.create_task(turns.take())
        await settle()
        turns.give_back()
        leaves.cancel()  # before it has noticed
        await settle()
        assert leaves.cancelled()
        assert stays.done()

    go(main)


def test_a_thread_is_free_when_its_work_is_done_and_not_when_nobody_waits_for_it_any_more() -> None:
    async def main() -> None:
        workers = Workers(1, "the test")
        may_end = threading.Event()
        left = asyncio.create_task(workers.run(lambda: may_end.wait(240)))
        await settle()
        left.cancel()
        following = asyncio.create_task(workers.run(threading.get_ident))
        await settle()
        assert not following.done()
        may_end.set()
        assert await following != threading.get_ident()

    go(main)


def test_an_error_of_the_work_reaches_its_caller_and_frees_the_thread() -> None:
    async def main() -> None:
        workers = Workers(1, "the test")
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await workers.run(lambda: 1 // 0)

    go(main)


class Pixels:
    """What weak references can follow."""


def test_closed_workers_have_no_threads_and_refuse_work() -> None:
    async def main() -> None:
        workers = Workers(2, "the test")
        thread = await workers.run(threading.current_thread)
        workers.close()
        thread.join(240)
        assert not thread.is_alive()
        for _ in range(3):
            with pytest.raises(Busy, match="shutting down"):
                await workers.run(threading.current_thread)

    go(main)


def test_workers_that_rest_have_no_threads_and_start_others_for_work() -> None:
    async def main() -> None:
        workers = Workers(2, "the test")
        thread = await workers.run(threading.current_thread)
        workers.rest()
        thread.join(240)
        assert not thread.is_alive()
        assert await workers.run(threading.current_thread) is not thread

    go(main)


def test_objects_of_failed_work_are_freed_with_its_error(without_collector: None) -> None:
    made: list[weakref.ref[Pixels]] = []

    def fail() -> None:
        pixels = Pixels()
        made.append(weakref.ref(pixels))
        raise ValueError("no")

    async def main() -> None:
        workers = Workers(1, "the test")
        with suppress(ValueError):
            await workers.run(fail)
        # The thread forgets its last piece of work when it gets another.
        await workers.run(int)
        assert made[0]() is None

    go(main)


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()

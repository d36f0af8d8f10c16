"""Processes that jobs take in turns: each job ends with whoever waits for it, and with the pool."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from weft.config.helper import HelperFailed
from weft.text.helpers import HelperPool
from weft.text.turns import Busy, Stoppable


class FakeProcess:
    """A process whose work ends when it is killed, and not before."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.killed = threading.Event()
        self.calls: list[str] = []
        self.can_start = True

    def start(self) -> None:
        if not self.can_start:
            raise OSError("no process can be started")
        self.calls.append("start")

    def kill(self) -> None:
        self.calls.append("kill")
        self.killed.set()

    def close(self) -> None:
        self.calls.append("close")

    def endless(self) -> None:
        self.begun.set()
        assert self.killed.wait(240)
        self.killed.clear()
        raise HelperFailed(out_of_time=False)


def go(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


async def begun(process: FakeProcess) -> None:
    assert await asyncio.to_thread(process.begun.wait, 240)
    process.begun.clear()


def test_work_that_nobody_waits_for_ends_with_its_process_which_is_replaced() -> None:
    async def main() -> None:
        process = FakeProcess()
        pool = HelperPool([process], "the test")
        left = asyncio.create_task(pool.run(FakeProcess.endless))
        await begun(process)
        assert process.calls == ["start"]
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert await pool.run(lambda it: len(it.calls)) >= 3  # killed, started, and started again
        assert process.calls[:3] == ["start", "kill", "start"]
        pool.close()

    go(main)


def test_a_closed_pool_ends_what_is_done_and_does_no_more() -> None:
    async def main() -> None:
        busy = FakeProcess()
        idle = FakeProcess()
        pool = HelperPool([busy, idle], "the test")
        running = asyncio.create_task(pool.run(FakeProcess.endless))
        await begun(busy)
        pool.close()
        pool.close()
        with pytest.raises(Busy, match="shutting down"):
            await running
        with pytest.raises(Busy, match="shutting down"):
            await pool.run(FakeProcess.endless)
        assert idle.calls[-1] == busy.calls[-1] == "close"
        assert "kill" not in idle.calls

    go(main)


def test_a_process_that_cannot_be_started_now_is_started_for_a_later_job() -> None:
    async def main() -> None:
        process = FakeProcess()
        process.can_start = False
        pool = HelperPool([process], "the test")
        with pytest.raises(OSError, match="no process"):
            await pool.run(lambda it: it.calls)
        process.can_start = True
        assert await pool.run(lambda it: it.calls[:]) == ["start"]
        pool.close()

    go(main)


def test_an_error_of_the_work_leaves_the_process_to_the_next() -> None:
    async def main() -> None:
        pool = HelperPool([FakeProcess()], "the test")
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await pool.run(lambda it: 1 // 0)
        pool.close()

    go(main)


def test_stopped_work_raises_for_all_current_and_later_callers() -> None:
    async def main() -> None:
        work = Stoppable()
        ended: list[bool] = []

        async def endless() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        waiting = [asyncio.create_task(work.run(endless())) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting[0].cancel()  # its own end is no stop
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        work.stop()
        with pytest.raises(Busy, match="shutting down"):
            await waiting[1]
        assert len(ended) == 2
        with pytest.raises(Busy, match="shutting down"):
            await work.run(endless())

    go(main)

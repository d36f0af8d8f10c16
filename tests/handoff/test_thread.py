"""A thread for connections: when it has been stopped, nothing of it runs any more."""

from __future__ import annotations

import asyncio

from weft.handoff.thread import LoopThread


def test_when_it_has_been_stopped_all_of_its_tasks_have_ended() -> None:
    ended: list[str] = []

    async def linger() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(10_000):
                await asyncio.sleep(0)
            ended.append("slowly")

    async def begin() -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(linger())
        await asyncio.sleep(0)
        return task

    thread = LoopThread("test")
    thread.start()
    asyncio.run_coroutine_threadsafe(begin(), thread.loop).result()
    thread.stop()
    assert ended == ["slowly"]
    assert thread.loop.is_closed()

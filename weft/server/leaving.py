"""Ends work for a client that has left before its answer.

While an answer is sent, the answer itself notices (`stream.py`). Before that, a handler works:
mostly so shortly that nobody can leave in between. Long work is run by `while_client_waits`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

from starlette.types import Receive

from weft.server.errors import ClientGone

T = TypeVar("T")

# Of the request that the current task answers; its body has been read when work begins.
receiver: ContextVar[Receive] = ContextVar("receiver")


async def while_client_waits(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects; then `ClientGone` is
    raised."""
    receive = receiver.get(None)
    if receive is None:
        return await work
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        # An exception of the task refers to this frame, which would refer to the task.
        del task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

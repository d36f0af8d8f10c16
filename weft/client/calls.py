"""Control requests that wait for their replies.

A call is a message with a number; its reply carries the same number, and may come in any order.
Knows nothing of any single message.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from weft.client.engine_state import EngineUnavailable
from weft.messages.calls import CallFailed, ControlReply, ControlRequest, reply_type
from weft.messages.codec import ToEngine

CALL_TIMEOUT_S = 10.0

R = TypeVar("R", bound=ControlReply)


class EngineFault(Exception):
    """The engine failed on a control request, or its reply could not be read: a fault of ours."""


class PendingCalls:
    """The open calls of one event loop."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiters: dict[int, asyncio.Future[ControlReply]] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    async def call(
        self,
        send: Callable[[ToEngine], None],
        request: ControlRequest[R],
        timeout_s: float,
    ) -> R:
        """Send `request` under its own number, and wait for its reply.

        Raises `EngineUnavailable` without a reply in time, `EngineFault` if the engine failed.
        """
        number = next(self._numbers)
        waiter: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._waiters[number] = waiter
        try:
            send(replace(request, call=number))
            reply = await asyncio.wait_for(waiter, timeout_s)
        except TimeoutError as exc:
            raise EngineUnavailable(f"the engine has not answered for {timeout_s:g} s") from exc
        finally:
            self._waiters.pop(number, None)
        if isinstance(reply, CallFailed):
            if reply.status == 503:
                raise EngineUnavailable(reply.message)
            raise EngineFault(reply.message)
        assert isinstance(reply, reply_type(type(request))), f"call {number} got {reply}"
        return reply

    def resolve(self, reply: ControlReply) -> None:
        """Hand a reply to its caller, unless the caller has left."""
        waiter = self._waiters.pop(reply.call, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(reply)

    def fail(self, number: int, exc: Exception) -> None:
        waiter = self._waiters.pop(number, None)
        if waiter is not None and not waiter.done():
            waiter.set_exception(exc)

    def fail_all(self, exc: Exception) -> None:
        for number in list(self._waiters):
            self.fail(number, exc)

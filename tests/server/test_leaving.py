"""Requests whose client leaves before there is an answer, and requests that the server ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from weft.config.keys import KeyDigests
from weft.config.limits import Limits
from weft.observe.metrics import Metrics
from weft.server.auth import Keys, Pages
from weft.server.errors import ClientGone
from weft.server.http.middleware import RequestMiddleware
from weft.server.leaving import receiver, while_client_waits


def go(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


async def never() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/chat/completions", {"error": {"type": "service_unavailable_error", "code": 503}}),
        ("/v1/messages", {"type": "error", "error": {"type": "overloaded_error"}}),
        ("/api/chat", {"error": "the server is shutting down"}),
    ],
)
def test_a_request_that_the_server_cancels_is_answered_in_the_form_of_its_api(
    path: str, form: dict[str, Any]
) -> None:
    sent: list[Message] = []

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        await never()

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await never()
        raise AssertionError

    async def main() -> None:
        keys = Keys(KeyDigests(), Pages(origins=[], hosts=[], bound="127.0.0.1"))
        metrics = Metrics("m")
        app = RequestMiddleware(waits, keys, metrics, Limits(), lambda path: (path, "user"))
        scope = {"type": "http", "path": path, "method": "POST", "headers": [], "client": None}
        scope["query_string"] = b""
        task = asyncio.create_task(app(scope, receive, send))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        await task

    go(main)
    assert sent[0]["status"] == 503
    found = json.loads(sent[1]["body"])
    for name, value in form.items():
        if isinstance(value, dict):
            assert value.items() <= found[name].items()
        else:
            assert found[name] == value


def test_work_is_cancelled_when_its_client_leaves() -> None:
    async def main() -> None:
        left = asyncio.Event()
        ended = asyncio.Event()

        async def receive() -> Message:
            await left.wait()
            return {"type": "http.disconnect"}

        async def work() -> None:
            try:
                await never()
            finally:
                ended.set()

        receiver.set(receive)
        task = asyncio.create_task(while_client_waits(work()))
        await asyncio.sleep(0)
        left.set()
        with pytest.raises(ClientGone):
            await task
        await ended.wait()

    go(main)


def test_work_that_ends_or_fails_before_its_client_leaves_does_so_for_the_caller() -> None:
    async def receive() -> Message:
        await never()
        raise AssertionError

    async def three() -> int:
        return 3

    async def fail() -> int:
        raise ZeroDivisionError

    async def main() -> None:
        assert await while_client_waits(three()) == 3  # outside of a request
        receiver.set(receive)
        assert await while_client_waits(three()) == 3
        with pytest.raises(ZeroDivisionError):
            await while_client_waits(fail())

    go(main)

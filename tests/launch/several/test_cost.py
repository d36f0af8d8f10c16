"""How much more a request costs the front of several models than that of one, in calls."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import MutableMapping
from types import FrameType
from typing import Any

from starlette.types import ASGIApp

from tests.launch.several.inprocess import CONFIG, LIMITS, Server, serving, spec
from weft.config.keys import KeyDigests
from weft.observe.several import HouseMetrics
from weft.residency.rules import Rules
from weft.server.app import with_edge

NAMES = "abcdefgh"


async def answer(app: ASGIApp, max_tokens: int) -> None:
    """Read one stream of the first model, without an HTTP client."""
    fields = {"model": "a", "prompt": "x", "max_tokens": max_tokens, "ignore_eos": True}
    fields["stream"] = True
    body = json.dumps(fields).encode()
    unread = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if unread:
            return unread.pop()
        await asyncio.Event().wait()
        raise AssertionError("nobody disconnects")

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
    }
    await app(scope, receive, send)
    assert sent[0]["status"] == 200


async def num_calls(app: ASGIApp, max_tokens: int, times: int = 10) -> float:
    """How many functions, also of C, are called for a request; those that go on count, too."""
    num = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    for _ in range(3):
        await answer(app, max_tokens)
    gc.disable()
    sys.setprofile(count)
    try:
        for _ in range(times):
            await answer(app, max_tokens)
    finally:
        sys.setprofile(None)
        gc.enable()
    return num / times


def alone(server: Server) -> ASGIApp:
    """The first model, as a server has it that has no other."""
    served = server.front("a").served
    context = served.context
    return with_edge(
        served.routes,
        served.operations,
        CONFIG,
        LIMITS,
        KeyDigests(),
        HouseMetrics(),
        context.refusals,
        context.batches,
    )


async def measured(num_models: int, ttl_s: float = 0.0) -> tuple[list[float], list[float]]:
    """The calls of a short and a long answer, of one model alone and beside others."""
    specs = [spec(name, ttl_s=ttl_s) for name in NAMES[:num_models]]
    async with serving(*specs, rules=Rules(10_000)) as server:
        for name in NAMES[:num_models]:
            assert (await server.complete(name)).status_code == 200
        one = [await num_calls(alone(server), tokens) for tokens in (5, 105)]
        more = [await num_calls(server.app, tokens) for tokens in (5, 105)]
        return one, more


def test_a_token_costs_the_front_of_several_models_what_it_costs_that_of_one() -> None:
    one, more = asyncio.run(measured(2))
    per_token = (one[1] - one[0]) / 100
    assert (more[1] - more[0]) / 100 < 1.02 * per_token
    assert more[0] - one[0] < 2 * per_token, "a request costs less than two tokens more"


def test_a_request_costs_no_more_if_more_models_are_loaded() -> None:
    for ttl_s in (0.0, 1_000.0):
        _, few = asyncio.run(measured(2, ttl_s))
        _, many = asyncio.run(measured(8, ttl_s))
        assert many[0] <= few[0] + 1

"""How much more a request costs the front of several models than that of one, in calls."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from types import FrameType

from starlette.types import ASGIApp

from tests.launch.several.connected import ask
from tests.launch.several.inprocess import CONFIG, LIMITS, Server, serving, spec
from weft.config.keys import KeyDigests
from weft.observe.several import HouseMetrics
from weft.residency.rules import Rules
from weft.server.app import with_edge

NAMES = "abcdefgh"
# Where a request of one model and of several may differ. Not asyncio: what it does with timers of
# other requests depends on the time.
COUNTED = ("/weft/server/", "/weft/launch/", "/weft/residency/", "/weft/observe/", "/starlette/")
MOST_MORE = 20  # calls of about 420


async def answer(app: ASGIApp, max_tokens: int) -> None:
    """Read one stream of the first model, without an HTTP client."""
    fields = {"model": "a", "prompt": "x", "max_tokens": max_tokens, "ignore_eos": True}
    fields["stream"] = True
    found = await ask(app, "/v1/completions", json.dumps(fields).encode())
    assert found.status == 200


async def num_calls(app: ASGIApp, max_tokens: int, times: int = 10) -> float:
    """How many functions are called for a request, also of C from these; those that go on count,
    too."""
    num = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num
        is_counted = any(part in frame.f_code.co_filename for part in COUNTED)
        num += is_counted and event in ("call", "c_call")

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


async def measured(
    num_models: int, *lengths: int, ttl_s: float = 0.0
) -> tuple[list[float], list[float]]:
    """The calls of answers of these lengths, of one model alone and beside others."""
    specs = [spec(name, ttl_s=ttl_s) for name in NAMES[:num_models]]
    async with serving(*specs, rules=Rules(10_000)) as server:
        for name in NAMES[:num_models]:
            assert (await server.complete(name)).status_code == 200
        one = [await num_calls(alone(server), tokens) for tokens in lengths]
        more = [await num_calls(server.app, tokens) for tokens in lengths]
        return one, more


def test_a_token_costs_the_front_of_several_models_what_it_costs_that_of_one() -> None:
    one, more = asyncio.run(measured(2, 5, 105))
    per_token = (one[1] - one[0]) / 100
    assert (more[1] - more[0]) / 100 < 1.02 * per_token
    assert more[0] - one[0] <= MOST_MORE, "each is about half a thousandth of a request"


def test_a_request_costs_no_more_if_more_models_are_loaded() -> None:
    for ttl_s in (0.0, 1_000.0):
        _, [few] = asyncio.run(measured(2, 5, ttl_s=ttl_s))
        _, [many] = asyncio.run(measured(8, 5, ttl_s=ttl_s))
        assert many <= few + 1

"""Bodies on their way to the model that they name: whole or in pieces, and looked at once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import Request

from tests.launch.several.connected import Connection, ask
from tests.launch.several.inprocess import Server, serving, spec
from weft.config.limits import Limits
from weft.residency.rules import Rules
from weft.server.app import OPERATIONS
from weft.server.body import EarlyBody, read_body
from weft.server.errors import ApiError
from weft.server.several.asked import plain_name

PATH = "/v1/completions"


def body_of(**fields: Any) -> bytes:
    return json.dumps({"prompt": "x", "max_tokens": 2, **fields}).encode()


BODIES: dict[bytes, str | int] = {
    body_of(model="a"): "a",
    body_of(model="b"): "b",
    body_of(): "a",
    body_of(model=""): "a",
    body_of(model="default"): "a",
    body_of(model="other"): "b",  # an alias
    body_of(model="b", keep_alive="5m"): "b",
    body_of(model="b", name="a"): "b",
    body_of(model="b", prompt="\ud800 half of a pair"): "b",
    body_of(model="b", user="u" * 20_000): "b",
    body_of(model="b", user="u" * 300_000): "b",
    body_of(model="c"): 404,
    body_of(model=5): 400,
    body_of(model=["b"]): 400,
    b'{"model": "b", "prompt": "\xff"}': 400,
    b"[]": 400,
    b"{": 400,
    b"": 400,
}


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_body_gets_to_its_model_whole_or_in_pieces(is_whole: bool) -> None:
    async def work() -> None:
        specs = [spec("a"), spec("b", aliases=("other",))]
        async with serving(*specs, rules=Rules(10_000)) as server:
            for name in "ab":  # both are loaded
                assert (await server.complete(name)).status_code == 200
            for body, expected in BODIES.items():
                found = await ask(server.app, PATH, body, is_whole=is_whole)
                if isinstance(expected, str):
                    assert found.fields["model"] == expected, found
                    assert found.fields["choices"][0]["text"] == expected * 2
                else:
                    assert found.status == expected, found
                assert all_ended(server)

    asyncio.run(work())


def all_ended(server: Server) -> bool:
    return not any(one.num_open for one in server.house.facts.models.values())


def test_a_model_that_is_not_loaded_is_waited_for_also_if_its_body_is_there() -> None:
    async def work() -> None:
        async with serving(spec("a"), spec("b"), rules=Rules(10_000)) as server:
            found = await ask(server.app, PATH, body_of(model="b"))
            assert found.fields["model"] == "b"
            assert server.host("b").num_loads == 1
            server.roster.readiness.drain()
            assert (await ask(server.app, PATH, body_of(model="b"))).status == 503
            assert all_ended(server)

    asyncio.run(work())


def test_of_a_body_only_the_name_of_its_model_is_read() -> None:
    assert plain_name(b'{"model": "a", "more": [[1, {"model": "b"}]]}') == "a"
    assert plain_name(b"{}") == ""
    deep = b"[" * 1_000_000 + b"]" * 1_000_000
    assert plain_name(b'{"model": "a", "more": %b}' % deep) is None
    assert plain_name(b'{"name": "a"}') is None, "clients of Ollama mean the model"


def test_a_body_that_was_read_is_read_once_more_and_not_kept() -> None:
    async def work() -> None:
        async def after() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        early = EarlyBody(b"abc", after)
        request = Request({"type": "http", "headers": [], "weft.body": early}, early.receive)
        with pytest.raises(ApiError, match="larger than the limit"):
            await read_body(request, 2, 60.0)
        early = EarlyBody(b"abc", after)
        request = Request({"type": "http", "headers": [], "weft.body": early}, early.receive)
        assert await read_body(request, 3, 60.0) == b"abc"
        assert early.take() is None
        assert await request.receive() == await after()
        # A handler that reads the body by itself, such as one from outside.
        early = EarlyBody(b"abc", after)
        assert await Request({"type": "http", "headers": []}, early.receive).body() == b"abc"
        assert await early.receive() == await after()

    asyncio.run(work())


def test_a_body_that_has_arrived_needs_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with serving(spec("a"), spec("b"), rules=Rules(10_000)) as server:
            assert (await server.complete("a")).status_code == 200
            monkeypatch.setattr("weft.server.body.asyncio.timeout", None)
            assert (await ask(server.app, PATH, body_of(model="a"))).status == 200

        monkeypatch.undo()

    asyncio.run(work())
    most = int(Limits().max_body_mb * 1e6)
    connection = Connection(b"abc")
    scope = {"type": "http", "headers": [], "weft.connection": connection}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"abc", "more_body": False}

    assert asyncio.run(read_body(Request(scope, receive), most, 60.0)) == b"abc"
    with pytest.raises(ApiError, match="larger than the limit"):
        asyncio.run(read_body(Request(scope, receive), 2, 60.0))


def test_every_route_that_answers_for_a_model_goes_to_the_one_that_is_named() -> None:
    """But for those that concern all models, or none."""

    paths = {
        one.path
        for one in OPERATIONS
        if (one.method, one.access) == ("POST", "user") and "{" not in one.path
    }

    async def work() -> set[str]:
        elsewhere = set[str]()
        async with serving(spec("a"), spec("b"), rules=Rules(10_000)) as server:
            for path in paths:
                found = await ask(server.app, path, b'{"model": "c"}', is_whole=True)
                if found.status != 404:
                    elsewhere.add(path)
        return elsewhere

    assert asyncio.run(work()) == {"/v1/files", "/v1/batches", "/v1/messages/batches"}

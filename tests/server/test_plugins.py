"""Routes of `--plugins` change the access of no other route."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from weft.config.options import SettingsError
from weft.server.app import OPERATIONS, RouteTable
from weft.server.auth import Access
from weft.server.context import ServerContext
from weft.server.operation import Operation, delete, get, post
from weft.server.plugins import outside_operations


async def hello(context: ServerContext, request: Request) -> ASGIApp:
    return PlainTextResponse("hello")


def added(monkeypatch: pytest.MonkeyPatch, *routes: Operation) -> tuple[Operation, ...]:
    module = ModuleType("own_routes")
    module.ROUTES = routes  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_routes", module)
    return outside_operations("routes=own_routes:ROUTES", OPERATIONS)


@pytest.mark.parametrize("access", ["user", "admin"])
@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("/abort_request", "POST /abort_request"),  # only for admins
        ("/v1/completions", "POST /v1/completions"),  # for users
        ("/v1/models/own", "GET /v1/models/{id:path}"),
        ("/v1/models/{other}", "GET /v1/models/{id:path}"),
        ("/v1/m{other:path}", "GET /v1/models"),
    ],
)
def test_a_path_of_the_servers_own_routes_is_refused_with_any_method(
    monkeypatch: pytest.MonkeyPatch, path: str, own: str, access: Access
) -> None:
    for route in (get, delete):
        with pytest.raises(SettingsError) as caught:
            added(monkeypatch, route(path, hello, "Hello", access=access))
        assert path in str(caught.value)
        assert "whose path is that of" in str(caught.value)
        assert any(f"{one.method} {one.path}" == own for one in OPERATIONS)


def test_the_paths_of_plugins_have_one_access_each(monkeypatch: pytest.MonkeyPatch) -> None:
    several = (
        get("/own", hello, "Hello"),
        post("/own", hello, "Hello"),
        delete("/own-admin", hello, "Hello", access="admin"),
    )
    found = added(monkeypatch, *several)
    assert [(one.method, one.path) for one in found] == [(one.method, one.path) for one in several]
    table = RouteTable((*OPERATIONS, *found))
    assert table.find("/own") == ("/own", "user")
    assert table.find("/own-admin") == ("/own-admin", "admin")
    assert table.find("/abort_request") == ("/abort_request", "admin")
    for path in ("/own", "/own{rest}"):
        with pytest.raises(SettingsError, match="access"):
            added(monkeypatch, *several, delete(path, hello, "Hello", access="admin"))
    with pytest.raises(SettingsError, match="whose path is that of GET /own"):
        added(monkeypatch, *several, several[0])

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.server.fake import RunningServer, running
from weft.config.server import ServerConfig
from weft.server.app import OPERATIONS
from weft.server.auth import Keys

KEY = {"authorization": "Bearer user-key"}
ADMIN = {"authorization": "Bearer admin-key"}


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    with running(ServerConfig(api_key="user-key", admin_api_key="admin-key", drain_s=1.0)) as server:
        yield server


@pytest.fixture(scope="module")
def http(locked: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=locked.url, timeout=10) as client:
        yield client


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: f"{one.method} {one.path}")
def test_every_route_but_health_needs_a_key(http: httpx.Client, operation: object) -> None:
    path = operation.path.replace("{id:path}", "x")  # type: ignore[attr-defined]
    status = http.request(operation.method, path).status_code  # type: ignore[attr-defined]
    assert status == (200 if path in ("/health", "/ready") else 401)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer user-key-and-more"},
        {"authorization": "Bearer"},
        {"authorization": "Basic user-key"},
        {"authorization": "user-key"},
        {"authorization": "Bearer user-k\u00eby".encode("latin-1")},
        {"x-api-key": "wrong"},
    ],
)
def test_wrong_key_is_a_401_in_the_usual_form(http: httpx.Client, headers: dict[str, str]) -> None:
    answer = http.get("/v1/models", headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/V1/models", "//v1/models", "/invocations", "/nowhere", "/v1/../v1/models", "/docs"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD"])
def test_unknown_paths_tell_nothing_without_a_key(http: httpx.Client, path: str, method: str) -> None:
    assert http.request(method, path).status_code == 401


def test_both_ways_to_send_the_key(http: httpx.Client) -> None:
    for headers in (KEY, {"x-api-key": "user-key"}, {"authorization": "bearer user-key"}, ADMIN):
        assert http.get("/v1/models", headers=headers).status_code == 200


def test_websocket_upgrade_is_no_way_around(locked: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", locked.port), timeout=5) as connection:
        connection.sendall(
            b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: eA==\r\n\r\n"
        )
        assert connection.recv(1_000).startswith(b"HTTP/1.1 401")


def test_administration_needs_its_own_key(http: httpx.Client) -> None:
    assert http.post("/flush_cache", headers=KEY).status_code == 403
    assert http.post("/flush_cache", headers=ADMIN).status_code == 200


def test_without_an_admin_key_only_this_machine_may_administrate() -> None:
    keys = Keys(ServerConfig(api_key="user-key"))

    def status(host: str, **headers: str) -> int:
        from starlette.datastructures import Headers

        refusal = keys.refusal({"client": (host, 1)}, Headers(KEY | headers), "admin")
        return 200 if refusal is None else refusal.status

    assert status("127.0.0.1") == status("::1") == 200
    assert status("10.0.0.1") == status("192.168.1.5") == 403
    assert status("127.0.0.1", **{"x-forwarded-for": "10.0.0.1"}) == 403
    assert status("127.0.0.1", forwarded="for=10.0.0.1") == 403
    assert status("127.0.0.1", origin="http://localhost:30000") == 200
    assert status("127.0.0.1", origin="http://evil.example") == 403
    assert status("127.0.0.1", origin="http://127.0.0.1.evil.example") == 403
    assert status("127.0.0.1", origin="null") == 403


def test_keys_are_kept_as_hashes() -> None:
    kept = vars(Keys(ServerConfig(api_key="user-key", admin_api_key="admin-key"))).values()
    assert all(b"key" not in value and len(value) == 32 for value in kept)


def test_cors_answers_only_allowed_origins() -> None:
    with running(ServerConfig(cors_origins="https://a.example, https://b.example", api_key="k", drain_s=1.0)) as server:
        preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        url = f"{server.url}/v1/chat/completions"
        allowed = httpx.options(url, headers={"origin": "https://b.example", **preflight})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://b.example"
        assert httpx.options(url, headers={"origin": "https://c.example", **preflight}).status_code == 400
        refused = httpx.post(url, headers={"origin": "https://a.example"})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://a.example")

from __future__ import annotations

import io
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.datastructures import Headers

from tests.server.fake import HANG_S, RunningServer, running
from weft.config.keys import KeyDigests, digest, read_keys
from weft.config.options import SettingsError
from weft.config.server import ServerConfig
from weft.server.app import OPERATIONS
from weft.server.auth import Keys, Pages

KEY = {"authorization": "Bearer user-key"}
ADMIN = {"authorization": "Bearer admin-key"}


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    with running(
        ServerConfig(api_key="user-key", admin_api_key="admin-key", drain_s=1.0)
    ) as server:
        yield server


@pytest.fixture(scope="module")
def http(locked: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=locked.url, timeout=HANG_S) as client:
        yield client


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: f"{one.method} {one.path}")
def test_every_route_but_health_and_the_page_needs_a_key(
    http: httpx.Client, operation: object
) -> None:
    path = operation.path.replace("{id:path}", "x").replace("{name:path}", "page.css")  # type: ignore[attr-defined]
    status = http.request(operation.method, path).status_code  # type: ignore[attr-defined]
    is_open = path in ("/health", "/ready", "/ping", "/", "/page/page.css")
    assert status == (200 if is_open else 401)


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


@pytest.mark.parametrize("path", ["/V1/models", "//v1/models", "/nowhere", "/v1/../v1/models"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD"])
def test_unknown_paths_tell_nothing_without_a_key(
    http: httpx.Client, path: str, method: str
) -> None:
    assert http.request(method, path).status_code == 401


def test_both_ways_to_send_the_key(http: httpx.Client) -> None:
    for headers in (KEY, {"x-api-key": "user-key"}, {"authorization": "bearer user-key"}, ADMIN):
        assert http.get("/v1/models", headers=headers).status_code == 200


def test_websocket_upgrade_is_no_way_around(locked: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", locked.port), timeout=HANG_S) as connection:
        connection.sendall(
            b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: eA==\r\n\r\n"
        )
        assert connection.recv(1_000).startswith(b"HTTP/1.1 401")


def test_administration_needs_its_own_key(http: httpx.Client) -> None:
    assert http.post("/flush_cache", headers=KEY).status_code == 403
    assert http.post("/flush_cache", headers=ADMIN).status_code == 200


def status(config: ServerConfig, client: str = "127.0.0.1", **headers: str) -> int:
    """Of an administrative call from `client`."""
    digests, _ = read_keys(config)
    named = Headers(
        {"host": "127.0.0.1:30000"}
        | {name.replace("_", "-"): text for name, text in headers.items()}
    )
    keys = Keys(digests, Pages(origins=["https://panel.example"]))
    scope = {"client": (client, 1)}
    refusal = keys.refusal(scope, named, "admin", keys.caller(scope, named))
    return 200 if refusal is None else refusal.status


def test_without_any_key_only_this_machine_may_administrate() -> None:
    open_to_all = ServerConfig()
    assert status(open_to_all) == status(open_to_all, "::1", host="[::1]:30000") == 200
    assert status(open_to_all, "10.0.0.1") == status(open_to_all, "192.168.1.5") == 403
    assert status(open_to_all, x_forwarded_for="10.0.0.1") == 403
    assert status(open_to_all, forwarded="for=10.0.0.1") == 403


def test_with_a_user_key_alone_there_is_no_administration() -> None:
    assert status(ServerConfig(api_key="user-key"), authorization="Bearer user-key") == 403


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"origin": "http://127.0.0.1:30000"}, 200),
        ({"origin": "http://localhost:30000", "host": "localhost:30000"}, 200),
        ({"sec_fetch_site": "same-origin"}, 200),
        ({"sec_fetch_site": "none"}, 200),
        ({"origin": "http://127.0.0.1:8080"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1.evil.example:30000"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": "http://[zz]"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
    ],
)
@pytest.mark.parametrize("config", [ServerConfig(), ServerConfig(admin_api_key="admin-key")])
def test_pages_of_other_origins_cannot_administrate(
    config: ServerConfig, headers: dict[str, str], expected: int
) -> None:
    assert status(config, **(headers | ADMIN)) == expected


def test_a_page_that_takes_our_address_for_its_name_cannot_administrate() -> None:
    assert (
        status(ServerConfig(), host="evil.example:30000", origin="http://evil.example:30000") == 403
    )


def test_pages_of_allowed_origins_administrate_with_the_key() -> None:
    page = {"origin": "https://panel.example"}
    assert status(ServerConfig(admin_api_key="admin-key"), **(page | ADMIN)) == 200


def test_keys_are_kept_as_hashes_alone() -> None:
    digests, config = read_keys(ServerConfig(api_key="user-key", admin_api_key="admin-key"))
    assert config.api_key == ""
    assert config.admin_api_key == ""
    assert [len(one) for one in (*digests.user, *digests.admin)] == [32, 32]
    assert b"key" not in b"".join((*digests.user, *digests.admin))


def test_a_file_has_a_key_in_each_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    # As an editor on Windows writes it.
    file.write_bytes(
        b"\xef\xbb\xbf# ours\r\nfirst\r\n\r\n  second  # here\r\n#third\r\nfo#urth\r\n"
    )
    with running(ServerConfig(api_key="given", api_key_file=str(file), drain_s=1.0)) as server:

        def status(key: str) -> int:
            return httpx.get(f"{server.url}/version", headers={"x-api-key": key}).status_code

        assert [status(key) for key in ("given", "first", "second", "fo#urth")] == [200] * 4
        assert [status(key) for key in ("third", "#third", "# ours", "", "firs")] == [401] * 5


@pytest.mark.parametrize("content", [None, b"", b"# nothing\n", b"\xff\xfe"])
def test_a_file_without_keys_opens_nothing(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError, match=r"--api-key-file is .*keys"):
        read_keys(ServerConfig(api_key_file=str(file)))


def test_every_key_is_compared_whichever_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(given: bytes, kept: bytes) -> bool:
        compared.append(kept)
        return given == kept

    monkeypatch.setattr("weft.server.auth.hmac.compare_digest", compare)
    keys = Keys(
        KeyDigests(user=(digest("a"), digest("b"), digest("c")), admin=(digest("d"),)), Pages()
    )
    for key in ("a", "c", "d", "x"):
        compared.clear()
        keys.caller({}, Headers({"x-api-key": key}))
        assert len(compared) == 4


def test_metrics_are_open_by_choice() -> None:
    with running(ServerConfig(api_key="k", open_metrics=True, drain_s=1.0)) as server:
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        assert httpx.get(f"{server.url}/server_info").status_code == 401


def test_every_administrative_call_leaves_a_line(http: httpx.Client, lines: io.StringIO) -> None:
    http.post("/flush_cache", headers=ADMIN | {"x-request-id": "flush-1"})
    http.post("/flush_cache", headers=KEY)
    http.get("/requests/a%0d%0aforged", headers=KEY)
    http.get("/v1/models", headers=KEY)
    calls = [line for line in lines.getvalue().splitlines() if " audit admin_call " in line]
    assert len(calls) == 3
    assert "info audit admin_call rid=flush-1 method=POST path=/flush_cache key=sha256:" in calls[0]
    assert calls[0].endswith(" client=127.0.0.1 status=200")
    assert "warning audit" in calls[1]
    assert calls[1].endswith(" status=403")
    assert r'path="/requests/a\r\nforged"' in calls[2]
    assert not any("admin-key" in line or "user-key" in line for line in calls)


def test_cors_answers_only_allowed_origins() -> None:
    with running(
        ServerConfig(cors_origins="https://a.example, https://b.example", api_key="k", drain_s=1.0)
    ) as server:
        preflight = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        url = f"{server.url}/v1/chat/completions"
        allowed = httpx.options(url, headers={"origin": "https://b.example", **preflight})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://b.example"
        assert (
            httpx.options(url, headers={"origin": "https://c.example", **preflight}).status_code
            == 400
        )
        refused = httpx.post(url, headers={"origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"

"""What a web page can do with a server that it can reach: nothing, unless its origin is named or it
has the key."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import get_args

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from tests.server.fake import HANG_S, RunningServer, running
from weft.config.keys import KeyDigests, digest
from weft.config.server import ServerConfig
from weft.server.app import OPERATIONS
from weft.server.auth import FORWARDING, FORWARDING_PREFIXES, Access, Keys, Pages, host_name

TEXT = "/v1/completions"
ROUTES = [
    *(
        (
            one.method,
            one.path.replace("{id:path}", "x").replace("{id}", "x").replace("{rid:path}", "x"),
        )
        for one in OPERATIONS
    ),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
    ("OPTIONS", TEXT),
    ("HEAD", "/server_info"),
]
OF_OTHER_PAGES = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:8080"},
    {"origin": "http://127.0.0.1.evil.example"},
    {"origin": "file://"},
    {"origin": ""},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-user": "?1"},
]
FOREIGN_HOSTS = [
    "evil.example",
    "evil.example:30000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evil.example#localhost",
    "localhost@evil.example",
    "evil.example\\@localhost",
    "[::1",
    "",
]
PROBES = {"/health", "/ready", "/ping"}


@pytest.fixture(scope="module")
def keyless() -> Iterator[RunningServer]:
    config = ServerConfig(
        cors_origins="http://named.example",
        allowed_hosts="weft.example, .below.example",
        drain_s=1.0,
    )
    with running(config) as server:
        yield server


def ask_all(server: RunningServer, headers: dict[str, str]) -> dict[str, int]:
    """The status of each route."""
    found: dict[str, int] = {}
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=HANG_S)) as connection:
        for method, path in ROUTES:
            connection.request(method, path, headers=headers)
            with connection.getresponse() as answer:
                answer.read()
            found[f"{method} {path}"] = answer.status
    return found


@pytest.mark.parametrize("headers", OF_OTHER_PAGES, ids=str)
def test_pages_of_other_origins_get_nothing_from_any_route(
    keyless: RunningServer, headers: dict[str, str]
) -> None:
    assert set(ask_all(keyless, headers).values()) == {403}


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_no_route_answers_under_a_foreign_name(keyless: RunningServer, host: str) -> None:
    assert set(ask_all(keyless, {"host": host}).values()) == {403}


def test_only_probes_answer_under_a_foreign_address(keyless: RunningServer) -> None:
    answers = ask_all(keyless, {"host": "10.1.2.3:30000"})
    assert {route for route, status in answers.items() if status != 403} == {
        f"GET {path}" for path in PROBES
    }


def test_a_refused_page_reaches_no_engine_and_learns_how_to_be_admitted(
    keyless: RunningServer,
) -> None:
    before = len(keyless.engine.seen)
    answer = httpx.post(
        keyless.url + TEXT, json={"prompt": "x"}, headers={"origin": "http://evil.example"}
    )
    assert answer.status_code == 403
    assert answer.json()["error"]["type"] == "permission_error"
    assert "--cors-origins" in answer.json()["error"]["message"]
    answer = httpx.post(keyless.url + TEXT, json={"prompt": "x"}, headers={"host": "evil.example"})
    assert "'evil.example'" in answer.json()["error"]["message"]
    assert "--allowed-hosts" in answer.json()["error"]["message"]
    assert len(keyless.engine.seen) == before


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": "localhost:30000"},
        {"host": "LOCALHOST."},
        {"host": "app.localhost"},
        {"host": "127.0.0.2"},
        {"host": "[::1]:30000"},
        {"host": "0.0.0.0:30000"},
        {"host": "weft.example:443"},
        {"host": "a.b.below.example"},
        {"origin": "http://named.example"},
        {
            "origin": "http://named.example",
            "sec-fetch-site": "cross-site",
            "sec-fetch-mode": "cors",
        },
        {
            "origin": "http://localhost:30000",
            "host": "localhost:30000",
            "sec-fetch-site": "same-origin",
        },
        {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"},
        {"sec-fetch-site": "same-origin"},
        {"user-agent": "curl/8", "referer": "http://evil.example"},
    ],
    ids=str,
)
def test_programs_and_pages_that_are_ours_or_named_are_answered(
    keyless: RunningServer, headers: dict[str, str]
) -> None:
    for path in ("/v1/models", "/server_info", "/metrics", "/health", "/docs"):
        assert httpx.get(keyless.url + path, headers=headers).status_code == 200
    assert httpx.post(keyless.url + TEXT, json={"prompt": "x"}, headers=headers).status_code == 200


def refusal(
    keys: Keys, access: Access, headers: dict[str, str], client: str = "127.0.0.1", **scope: str
) -> int:
    """The status of what is refused, 200 of what is let in."""
    given = Headers({"host": "127.0.0.1:30000"} | headers)
    scope = {"client": (client, 1), **scope}
    found = keys.refusal(scope, given, access, keys.caller(scope, given))
    return 200 if found is None else found.status


@pytest.mark.parametrize("access", get_args(Access))
@pytest.mark.parametrize("headers", [*OF_OTHER_PAGES, {"host": "evil.example"}], ids=str)
def test_a_key_speaks_for_itself_wherever_it_comes_from(
    access: Access, headers: dict[str, str]
) -> None:
    """Administration apart. Without the key nothing is answered but probes, which tell nothing."""
    keys = Keys(KeyDigests(user=(digest("user-key"),)), Pages())
    if access != "admin":
        assert refusal(keys, access, headers | {"x-api-key": "user-key"}) == 200
    assert refusal(keys, access, headers) == (200 if access in ("open", "page") else 401)
    open_metrics = Keys(KeyDigests(user=(digest("user-key"),)), Pages(), open_metrics=True)
    assert refusal(open_metrics, "metrics", headers) == 403


def test_all_origins_may_be_named_but_not_for_administration() -> None:
    keys = Keys(KeyDigests(), Pages(origins=["*"]))
    assert refusal(keys, "user", {"origin": "http://evil.example"}) == 200
    assert (
        refusal(keys, "user", {"sec-fetch-site": "cross-site"}) == 403
    )  # which page it was is not told
    assert refusal(keys, "admin", {"origin": "http://evil.example"}) == 403


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", "", "192.168.1.5", "weft.example"])
def test_a_server_for_other_machines_answers_to_any_address_and_to_its_name(bound: str) -> None:
    keys = Keys(KeyDigests(), Pages(bound=bound))
    for host in ("192.168.1.5:30000", "[fd00::1]:30000", "127.0.0.1"):
        assert refusal(keys, "user", {"host": host}, client="192.168.1.7") == 200
    assert refusal(keys, "user", {"host": "evil.example"}) == 403
    assert refusal(keys, "user", {"host": "!"}) == 403
    assert refusal(keys, "user", {"host": "weft.example"}) == (
        200 if bound == "weft.example" else 403
    )


def test_all_names_may_be_allowed_but_not_for_administration_without_a_key() -> None:
    keys = Keys(KeyDigests(), Pages(hosts=["*"]))
    assert refusal(keys, "user", {"host": "weft.default.svc"}) == 200
    assert refusal(keys, "admin", {"host": "weft.default.svc"}) == 403


@given(host=st.text(st.characters(codec="latin-1"), max_size=40))
def test_no_text_is_taken_for_a_name_of_ours(host: str) -> None:
    pages = Pages(bound="127.0.0.1")
    if pages.refusal(Headers({"host": host})) is None:
        name = host_name(host)
        assert (
            name == "localhost"
            or name.endswith(".localhost")
            or name[0].isdigit()
            or ":" in name
            or name in host
        )


# ---- proxies


@pytest.mark.parametrize(
    "name",
    [
        *sorted(FORWARDING),
        *(f"{prefix}anything" for prefix in FORWARDING_PREFIXES),
        # as nginx, Apache, IIS, HAProxy, Envoy, Istio, Traefik, load balancers of clouds and
        # content networks name them
        *("x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "X-Forwarded-Anything"),
        *("X-Original-Forwarded-For", "X-Original-Host", "X-Original-URL", "X-Real-IP"),
        *("X-ProxyUser-Ip", "X-Cloud-Trace-Context", "X-Request-Start", "X-Queue-Start"),
        *(
            "X-Amzn-Trace-Id",
            "X-Amz-Cf-Id",
            "X-Azure-ClientIP",
            "X-ARR-LOG-ID",
            "X-AppEngine-User-IP",
        ),
        *("CF-Connecting-IP", "CF-Connecting-IPv6", "CF-Ray", "CDN-Loop", "Fastly-Client-IP"),
        *("Fly-Client-IP", "X-Vercel-Forwarded-For", "X-NF-Client-Connection-IP", "Via"),
        *("X-Envoy-External-Address", "X-Akamai-Edgescape", "X-Varnish", "WL-Proxy-Client-IP"),
    ],
)
def test_requests_that_a_proxy_forwards_are_not_administrative(name: str) -> None:
    keys = Keys(KeyDigests(), Pages(hosts=["*"]))
    assert refusal(keys, "admin", {}) == 200
    assert refusal(keys, "admin", {name: "127.0.0.1"}) == 403
    assert refusal(keys, "user", {name: "127.0.0.1"}) == 200


@pytest.mark.parametrize(
    "name",
    [
        *("traceparent", "tracestate", "x-b3-traceid", "x-request-id", "x-request-timeout-ms"),
        *("x-api-key", "x-stainless-lang", "x-title", "http-referer", "x-goog-api-key"),
    ],
)
def test_requests_of_local_programs_are_not_taken_for_those_of_a_proxy(name: str) -> None:
    keys = Keys(KeyDigests(), Pages(hosts=["*"]))
    assert refusal(keys, "admin", {name: "127.0.0.1"}) == 200


def test_a_proxy_that_says_nothing_of_itself_speaks_http_1_0() -> None:
    keys = Keys(KeyDigests(), Pages())
    assert refusal(keys, "admin", {"connection": "close"}, http_version="1.0") == 403
    assert refusal(keys, "user", {"connection": "close"}, http_version="1.0") == 200


def test_a_unix_socket_is_local_unless_a_proxy_uses_it() -> None:
    keys = Keys(KeyDigests(), Pages(hosts=["*"]))
    local = {"client": None, "http_version": "1.1"}
    direct = Headers({"host": "anything"})
    assert keys.refusal(local, direct, "admin", keys.caller(local, direct)) is None
    by_proxy = Headers({"host": "anything", "via": "1.1 proxy"})
    forwarded = keys.refusal(local, by_proxy, "admin", keys.caller(local, by_proxy))
    assert forwarded is not None


# ---- types of bodies

TYPES = [
    None,
    "application/json",
    "application/x-www-form-urlencoded",
    "text/plain",
    "multipart/form-data",
]
BROWSERS = [
    {},
    {"origin": "http://named.example"},
    {"sec-fetch-site": "same-origin"},
    {"sec-fetch-mode": "no-cors"},
]


@pytest.mark.parametrize(("kind", "browser"), list(itertools.product(TYPES, BROWSERS)), ids=str)
def test_only_programs_may_leave_out_the_type_of_a_body(
    keyless: RunningServer, kind: str | None, browser: dict[str, str]
) -> None:
    headers = browser | ({} if kind is None else {"content-type": kind})
    body = json.dumps({"prompt": "x", "text": "x", "stream": False})
    statuses = {}
    for path in (TEXT, "/generate", "/api/generate"):
        request = httpx.Request("POST", keyless.url + path, content=body, headers=headers)
        if kind is None:
            request.headers.pop("content-type", None)
        with httpx.Client(timeout=HANG_S) as http:
            statuses[path] = http.send(request).status_code
    is_json = kind == "application/json"
    is_program = not browser
    assert (
        statuses[TEXT]
        == statuses["/generate"]
        == (200 if is_json or (is_program and kind is None) else 415)
    )
    assert statuses["/api/generate"] == (200 if is_json or is_program else 415)

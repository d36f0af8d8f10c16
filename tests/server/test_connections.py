"""What a connection may do besides asking: trailers, bodies that nobody needs, ends and halves of
connections."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.server.fake import HANG_S, RunningServer, SkippingLoop, eventually, running
from tests.server.raw import connected, head, read_all, read_reply
from weft.config.limits import Limits
from weft.config.server import ServerConfig
from weft.server.http.protocol import IDLE_S

TEXT = "/v1/completions"
PROMPT = b'{"prompt":"x"}'
CHUNKED = "transfer-encoding: chunked"
ADMIN = {"authorization": "Bearer admin-key"}
KEYS = ServerConfig(api_key="user-key", admin_api_key="admin-key", drain_s=1.0)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def refusals(server: RunningServer, limit: str) -> float:
    metrics = httpx.get(f"{server.url}/metrics", headers=ADMIN, timeout=HANG_S).text
    found = re.search(rf'^weft:refused_total{{limit="{limit}"}} (\S+)', metrics, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    """A server with keys that reads on for long behind an early answer."""
    with running(KEYS, limits=Limits(linger_s=60)) as server:
        yield server


# ---- trailers and chunks


@pytest.mark.parametrize("path", [TEXT, "/flush_cache", "/nowhere"])
def test_a_key_in_a_trailer_is_no_key(locked: RunningServer, path: str) -> None:
    with connected(locked) as connection:
        trailer = b"0\r\nauthorization: Bearer admin-key\r\nx-api-key: admin-key\r\n\r\n"
        connection.sendall(head(f"POST {path}", CHUNKED) + chunk(PROMPT) + trailer)
        assert read_reply(connection).status == 401


def test_a_trailer_is_no_header_of_its_request_nor_of_the_next(server: RunningServer) -> None:
    with connected(server) as connection:
        trailer = b"0\r\nx-request-id: from-a-trailer\r\n\r\n"
        connection.sendall(head(f"POST {TEXT}", CHUNKED) + chunk(PROMPT) + trailer)
        first = read_reply(connection)
        connection.sendall(head("GET /version"))
        second = read_reply(connection)
    assert first.status == 200
    assert second.status == 200
    assert "from-a-trailer" not in (first.headers["x-request-id"], second.headers["x-request-id"])


@pytest.mark.parametrize(
    "without_end",
    [
        b"0\r\n" + b"x-more: and more\r\n" * 4_000,
        b"0\r\nx-long: " + b"a" * 60_000,
        b"0\r\n" + b"a" * 60_000,
        b"1;" + b"a" * 60_000,
        b"1;name=value\r\na\r\n" * 4_000,
        b'1;name="' + b"a" * 60_000,
        b"0" * 60_000,
    ],
    ids=["trailers", "value", "name", "extension", "extensions", "quoted", "zeros"],
)
@pytest.mark.parametrize(
    ("path", "given"), [(TEXT, ADMIN), (TEXT, {}), ("/nowhere", ADMIN), ("/health", {})]
)
def test_the_framing_of_a_body_is_bounded(
    locked: RunningServer, without_end: bytes, path: str, given: dict[str, str]
) -> None:
    """While the body is read, and behind a 401, 404 and 405."""
    before = refusals(locked, "max_framing_bytes")
    with connected(locked) as connection:
        connection.sendall(
            head(f"POST {path}", CHUNKED, *(f"{name}: {key}" for name, key in given.items()))
        )
        assert eventually(lambda: any(one.is_receiving for one in locked.connections))
        for start in range(0, len(without_end), 1_000):
            try:
                connection.sendall(without_end[start : start + 1_000])
            except OSError:  # closed already
                break
        read_all(connection)
    assert refusals(locked, "max_framing_bytes") == before + 1
    assert locked.engine.seen == []


def test_the_refusal_of_endless_trailers_names_what_is_too_large(server: RunningServer) -> None:
    with connected(server) as connection:
        connection.sendall(head(f"POST {TEXT}", CHUNKED))
        connection.sendall(chunk(PROMPT) + b"0\r\nx-long: ")
        assert eventually(
            lambda: any(
                one._body_len == len(PROMPT) and one.is_receiving for one in server.connections
            )
        )
        connection.sendall(b"a" * 2 * Limits().max_framing_bytes)
        reply = read_reply(connection)
    assert (reply.status, reply.is_last) == (400, True)
    assert "trailers" in json.loads(reply.body)["error"]["message"]


@pytest.mark.parametrize(("size", "status"), [(500, 200), (3_000, 400)])
def test_the_limit_of_what_comes_around_a_body_is_that_of_the_option(
    size: int, status: int
) -> None:
    with (
        running(limits=Limits(max_framing_bytes=1_024)) as server,
        connected(server) as connection,
    ):
        connection.sendall(head(f"POST {TEXT}", CHUNKED) + chunk(PROMPT))
        assert eventually(lambda: any(one._body_len == len(PROMPT) for one in server.connections))
        connection.sendall(b"0\r\nx-long: " + b"a" * size + b"\r\n\r\n")
        assert read_reply(connection).status == status


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_body_in_small_chunks_with_modest_extensions_is_taken(
    server: RunningServer, size: int
) -> None:
    body = json.dumps({"prompt": "x", "user": "u" * 20_000}).encode()
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    with connected(server) as connection:
        connection.sendall(head(f"POST {TEXT}", CHUNKED))
        for start in range(0, len(chunks), 500):
            connection.sendall(b"".join(map(chunk, chunks[start : start + 500])))
        connection.sendall(b"0;last=yes\r\nx-checksum: 1234\r\n\r\n")
        assert read_reply(connection).status == 200
        connection.sendall(head("GET /version"))
        assert read_reply(connection).status == 200


# ---- answers before the end of a body


ENDLESS = "content-length: 1000000"
EARLY = [  # a request whose body does not come, and the answer that does not wait for it
    ("GET /health", 200),
    ("GET /v1/models", 200),
    ("GET /metrics", 200),
    ("POST /flush_cache", 200),
    ("POST /nowhere", 404),
    ("POST /version", 405),
]


@pytest.mark.parametrize(("line", "status"), EARLY)
@pytest.mark.parametrize("length", [ENDLESS, CHUNKED], ids=["declared", "chunked"])
def test_an_answer_before_the_end_of_the_body_closes_the_connection_soon(
    line: str, status: int, length: str
) -> None:
    with (
        running(new_loop=SkippingLoop, limits=Limits(linger_s=50)) as server,
        connected(server) as connection,
    ):
        connection.sendall(head(line, length))
        reply = read_reply(connection, line.split()[0])
        assert (reply.status, reply.is_last) == (status, True)
        for _ in range(4):  # however it drips
            connection.sendall(b"1\r\na\r\n")
            server.skip(10)
            assert len(server.connections) == 1
        server.skip(10)
        read_all(connection)
        assert eventually(lambda: not server.connections)


def test_a_refusal_for_want_of_a_key_closes_the_connection_whose_body_drips() -> None:
    with (
        running(KEYS, new_loop=SkippingLoop, limits=Limits(linger_s=50)) as server,
        connected(server) as connection,
    ):
        connection.sendall(head(f"POST {TEXT}", ENDLESS))
        assert (reply := read_reply(connection)).status == 401
        assert reply.is_last
        server.skip(50)
        assert read_all(connection) == b""


def test_a_body_that_comes_too_late_closes_its_connection() -> None:
    limits = Limits(body_timeout_s=600, linger_s=50)
    with running(new_loop=SkippingLoop, limits=limits) as server, connected(server) as connection:
        connection.sendall(head(f"POST {TEXT}", ENDLESS) + b"{")
        assert eventually(lambda: any(one._head_len < 0 for one in server.connections))
        server.skip(600)
        assert (reply := read_reply(connection)).status == 408
        assert reply.is_last
        server.skip(50)
        assert read_all(connection) == b""


def test_no_more_than_a_bounded_part_of_a_refused_body_is_read() -> None:
    limits = Limits(linger_s=HANG_S, linger_mb=1)
    with running(limits=limits) as server, connected(server) as connection:
        connection.sendall(head("POST /nowhere", "content-length: 1000000000"))
        assert read_reply(connection).status == 404
        sent = 0
        with contextlib.suppress(OSError):  # closed
            while sent < 1_000_000_000:
                sent += connection.send(b"a" * 65_536)
        assert sent < 100_000_000  # what fits the buffers of the system, too


def test_a_client_that_sends_its_whole_body_reads_the_refusal() -> None:
    with running(KEYS) as server, httpx.Client(base_url=server.url, timeout=HANG_S) as http:
        for _ in range(3):
            answer = http.post(
                TEXT, content=b" " * 15_000_000, headers={"content-type": "application/json"}
            )
            assert answer.status_code == 401


def test_a_client_that_expects_100_continue_is_answered_without_its_body() -> None:
    with running(KEYS) as server, connected(server) as connection:
        connection.sendall(head(f"POST {TEXT}", "content-length: 14", "expect: 100-continue"))
        assert (reply := read_reply(connection)).status == 401
        assert reply.is_last
    with running(KEYS) as server, connected(server) as connection:
        key = "authorization: Bearer user-key"
        connection.sendall(head(f"POST {TEXT}", key, "content-length: 14", "expect: 100-continue"))
        assert connection.recv(1_000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(PROMPT)
        assert not (reply := read_reply(connection)).is_last
        assert reply.status == 200


# ---- offers of another protocol

H2C = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__")


@pytest.mark.parametrize("framing", ["content-length: 14", CHUNKED])
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_the_body_of_a_request_that_offers_another_protocol_is_read(
    server: RunningServer, framing: str, step: int
) -> None:
    body = PROMPT if framing != CHUNKED else chunk(PROMPT) + b"0\r\n\r\n"
    message = head(f"POST {TEXT}", *H2C, framing) + body
    with connected(server) as connection:
        for _ in range(2):
            for start in range(0, len(message), step):
                connection.sendall(message[start : start + step])
            assert (reply := read_reply(connection)).status == 200
            assert not reply.is_last


def test_pipelined_offers_of_another_protocol_get_one_answer_each(server: RunningServer) -> None:
    number = 300
    message = head("GET /version", *H2C) * number + head("GET /version", "connection: close")
    with connected(server) as connection:
        connection.sendall(message)
        assert read_all(connection).count(b"HTTP/1.1 200") == number + 1


def test_a_tunnel_is_refused(server: RunningServer) -> None:
    with connected(server) as connection:
        connection.sendall(head("CONNECT http://localhost:80/x"))
        assert read_all(connection).startswith(b"HTTP/1.1 400")


# ---- idle connections


def test_empty_lines_behind_an_answer_do_not_keep_a_connection() -> None:
    with (
        running(new_loop=SkippingLoop, limits=Limits(keep_alive_s=50)) as server,
        connected(server) as connection,
    ):
        connection.sendall(head("GET /version"))
        assert read_reply(connection).status == 200
        for _ in range(4):
            connection.sendall(b"\r\n")
            server.skip(10)
            assert len(server.connections) == 1
        server.skip(10)
        assert read_all(connection) == b""


def test_empty_lines_before_a_request_are_overlooked(server: RunningServer) -> None:
    with connected(server) as connection:
        for _ in range(2):
            connection.sendall(b"\r\n\r\n" + head("GET /version"))
            assert read_reply(connection).status == 200


BESIDE = [  # what a client without a key may leave open
    b"",
    b"\r\n",
    b"GET /v1/mod",
    head("GET /health"),
    head("GET /health", ENDLESS),
    head(f"POST {TEXT}", ENDLESS),
    head("POST /nowhere", CHUNKED) + b"5\r\nab",
    head("GET /v1/models"),
]


@pytest.mark.parametrize("left_open", BESIDE, ids=range(len(BESIDE)))
def test_connections_without_a_key_never_keep_out_those_with_one(left_open: bytes) -> None:
    limits = Limits(max_connections=8, linger_s=50, head_timeout_s=600)
    with running(KEYS, new_loop=SkippingLoop, limits=limits) as server:
        others = [
            socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) for _ in range(200)
        ]
        for one in others:
            try:
                one.sendall(left_open)
            except OSError:  # closed already
                continue
        for _ in range(3):
            answer = httpx.post(
                f"{server.url}{TEXT}",
                json={"prompt": "x"},
                headers={"authorization": "Bearer user-key"},
                timeout=HANG_S,
            )
            assert answer.status_code == 200
            server.skip(IDLE_S)
        for one in others:
            one.close()


# ---- halves of connections


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sends_no_more_gets_its_answer(server: RunningServer, stream: bool) -> None:
    body = json.dumps({"prompt": "x", "stream": stream, "max_tokens": 5}).encode()
    server.engine.hold = True
    with connected(server) as connection:
        connection.sendall(head(f"POST {TEXT}", f"content-length: {len(body)}") + body)
        connection.shutdown(socket.SHUT_WR)
        assert eventually(
            lambda: any(one._probe and one._probe.timer for one in server.connections)
        )
        server.engine.hold = False
        reply = read_reply(connection)
        assert read_all(connection) == b""
    assert reply.status == 200
    assert (b"[DONE]" in reply.body) == stream
    assert server.engine.aborted == []


def test_a_client_that_sends_no_more_gets_all_answers_that_it_has_asked_for(
    server: RunningServer,
) -> None:
    request = head(f"POST {TEXT}", f"content-length: {len(PROMPT)}") + PROMPT
    with connected(server) as connection:
        connection.sendall(request * 3)
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection).count(b"HTTP/1.1 200 OK") == 3


def test_half_a_connection_in_the_middle_of_a_stream_gets_the_rest(server: RunningServer) -> None:
    server.engine.script = lambda ids: [97] * 40
    server.engine.step_s = 0.02
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 40}).encode()
    with connected(server) as connection:
        connection.sendall(head(f"POST {TEXT}", f"content-length: {len(body)}") + body)
        assert eventually(lambda: any(one.num_done > 2 for one in server.engine.running.values()))
        connection.shutdown(socket.SHUT_WR)
        reply = read_reply(connection)
    assert reply.body.count(b'"text":"a"') == 40
    assert reply.body.endswith(b"data: [DONE]\n\n")


def test_a_client_that_is_gone_behind_a_pipelined_request_aborts_the_first(
    server: RunningServer,
) -> None:
    server.engine.hold = True
    with connected(server) as connection:
        connection.sendall((head(f"POST {TEXT}", f"content-length: {len(PROMPT)}") + PROMPT) * 2)
        assert eventually(lambda: server.engine.seen)
    assert eventually(lambda: len(server.engine.aborted) == 1)
    assert eventually(lambda: server.client.num_open == 0)


@pytest.mark.parametrize("headers", [[], ["connection: keep-alive"]])
def test_a_stream_for_http_1_0_ends_with_the_connection_and_has_no_chunks(
    server: RunningServer, headers: list[str]
) -> None:
    body = b'{"prompt":"x","stream":true,"max_tokens":5}'
    with connected(server) as connection:
        request = head(f"POST {TEXT}", f"content-length: {len(body)}", *headers).replace(
            b"HTTP/1.1", b"HTTP/1.0"
        )
        connection.sendall(request + body)
        answer = read_all(connection)
    start, _, events = answer.partition(b"\r\n\r\n")
    assert start.startswith(b"HTTP/1.1 200 OK")
    assert b"transfer-encoding" not in start.lower()
    assert b"connection: close" in start.lower()
    lines = [line for line in events.split(b"\n\n") if line]
    assert all(line.startswith(b"data: ") for line in lines)
    assert lines[-1] == b"data: [DONE]"
    assert len(lines) >= 6


def test_a_whole_answer_for_http_1_0_has_its_length(server: RunningServer) -> None:
    with connected(server) as connection:
        connection.sendall(head("GET /version").replace(b"HTTP/1.1", b"HTTP/1.0"))
        answer = read_all(connection)
    assert answer.endswith(b'{"version":"0.1.0"}')
    assert b"content-length: 19" in answer

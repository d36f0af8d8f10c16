"""The guards of the protocol, and what importing the server costs."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import httpx

from tests.server.fake import HANG_S, SkippingLoop, eventually, running
from weft.config.limits import Limits
from weft.config.server import ServerConfig
from weft.server.serve import make_server, run


def test_head_that_does_not_come_is_cut_off() -> None:
    with running(new_loop=SkippingLoop, limits=Limits(head_timeout_s=600)) as server:
        for beginning in (b"", b"GET /health HTTP/1.1\r\nhost:"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as connection:
                connection.sendall(beginning)
                head_lens = [len(beginning)]
                assert eventually(
                    lambda wanted=head_lens: [one._head_len for one in server.connections] == wanted
                )
                server.skip(300)
                assert len(server.connections) == 1
                server.skip(300)
                assert connection.recv(100) == b""


def test_idle_connection_is_kept_but_every_head_has_its_time() -> None:
    limits = Limits(head_timeout_s=600, keep_alive_s=3_600)
    with (
        running(new_loop=SkippingLoop, limits=limits) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as connection,
    ):
        for _ in range(3):
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert connection.recv(1_000).startswith(b"HTTP/1.1 200")
            server.skip(1_200)
        connection.sendall(b"GET /health HTTP/1.1\r\nhost:")
        assert eventually(lambda: any(one._head_len > 0 for one in server.connections))
        server.skip(600)
        assert connection.recv(1_000) == b""


def test_idle_connection_is_kept_for_parts_of_seconds_too() -> None:
    async def app(*_: object) -> None:
        pass

    server = make_server(app, ServerConfig(), Limits(keep_alive_s=1.5))
    assert server.config.timeout_keep_alive == 1.5


def test_slow_body_is_no_slow_head() -> None:
    limits = Limits(head_timeout_s=600, body_timeout_s=3_600)
    with (
        running(new_loop=SkippingLoop, limits=limits) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as connection,
    ):
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 14\r\n\r\n"
        )
        for byte in b'{"prompt":"x"}':
            assert eventually(lambda: any(one._head_len < 0 for one in server.connections))
            server.skip(200)
            connection.sendall(bytes([byte]))
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_stalled_reader_is_cut_off() -> None:
    with running(limits=Limits(stall_timeout_s=0.2)) as server:
        server.engine.script = lambda ids: [97] * 1_900
        body = {"prompt": ["x"] * 300, "stream": True, "max_tokens": 1_900, "logprobs": 20}
        with (
            httpx.Client(base_url=server.url, timeout=HANG_S) as http,
            http.stream("POST", "/v1/completions", json=body),
        ):
            assert eventually(lambda: not server.connections)
            assert eventually(lambda: server.client.num_open == 0 and not server.engine.running)


def test_answers_do_not_wait_for_acknowledgements() -> None:
    with (
        running(new_loop=asyncio.new_event_loop) as server,
        httpx.Client(base_url=server.url, timeout=HANG_S) as http,
    ):
        http.get("/version")
        [connection] = [one.transport.get_extra_info("socket") for one in server.connections]
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_run_returns_what_main_returns() -> None:
    async def main() -> int:
        return 5

    assert run(main()) == 5


def test_server_is_imported_without_torch_and_transformers() -> None:
    code = (
        "import sys, weft.server.app, weft.server.serve\n"
        "print(sorted({'torch', 'transformers', 'pydantic', 'openai'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"

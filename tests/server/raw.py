"""HTTP byte by byte, for what no client library would send."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Iterator
from typing import NamedTuple

from tests.server.fake import HANG_S, RunningServer


class Reply(NamedTuple):
    """One answer. `is_last`: the server says that it closes the connection."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes
    is_last: bool


@contextlib.contextmanager
def connected(server: RunningServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as connection:
        yield connection


def head(line: str, *headers: str) -> bytes:
    """The head of a request such as "GET /version"."""
    return "\r\n".join([f"{line} HTTP/1.1", "host: localhost", *headers, "", ""]).encode("latin-1")


def read_reply(connection: socket.socket, method: str = "GET") -> Reply:
    """The next answer; interim ones are overlooked. Nothing may stand behind it yet: more than it
    is read ahead."""
    response = http.client.HTTPResponse(connection, method=method)
    response.begin()
    body = response.read()
    return Reply(response.status, response.headers, body, response.will_close)


def read_all(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            pieces.append(piece)
    return b"".join(pieces)

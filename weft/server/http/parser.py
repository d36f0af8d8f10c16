"""The parser of requests: httptools', but a request that offers another protocol is read as if it
did not offer any.

httptools takes the body of such a request for the other protocol. Java's HTTP client offers h2c
with its first request to a server, also with a body.
"""

from __future__ import annotations

from typing import Protocol

import httptools


class PartsOfRequest(Protocol):
    """Hears of the parts of a request, and keeps those of its head."""

    url: bytes
    headers: list[tuple[bytes, bytes]]

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class HttpParser:
    """`httptools.HttpRequestParser` for `listener`, without upgrades.

    The head of a request with an offer is read twice, the second time without it; the listener
    hears only of the second end.
    """

    def __init__(self, listener: PartsOfRequest) -> None:
        self._listener = listener
        self.on_message_begin = listener.on_message_begin
        self.on_url = listener.on_url
        self.on_header = listener.on_header
        self.on_body = listener.on_body
        self._parser = httptools.HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.should_upgrade = self._parser.should_upgrade
        self.should_keep_alive = self._parser.should_keep_alive
        self.get_http_version = self._parser.get_http_version
        self.get_method = self._parser.get_method

    def feed_data(self, data: bytes) -> None:
        """Raises `httptools.HttpParserError`."""
        rest = memoryview(data)
        while rest:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]
                if self.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("no tunnels") from offer
                self._parser.feed_data(self._head_without_offer())

    def on_headers_complete(self) -> None:
        if not self.should_upgrade():
            self._listener.on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.should_upgrade():
            self._listener.on_message_complete()

    def _head_without_offer(self) -> bytes:
        version = self.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.get_method(), self._listener.url, version)]
        for name, value in self._listener.headers:
            if name != b"upgrade":
                lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

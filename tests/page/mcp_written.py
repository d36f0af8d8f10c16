"""A server of the Model Context Protocol, written after its specification of 2025-06-18 (streamable
HTTP), for tests of the live page: sessions, answers as JSON and as a stream, a server that asks its
client, one that ends in the midst of an answer.

    python mcp_written.py PORT [ORIGIN ...]

Pages of these origins may reach it. The tool `wait` waits for 30 s; what was cancelled is listed by
the tool `cancelled`.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VERSION = "2025-06-18"
SESSION = "mcp-session-id"
WAIT_S = 30.0
TOOLS = ("add", "fail", "wait", "cancelled", "die")
SCHEMA = {"type": "object"}
UNKNOWN_TOOL = -32602


class State:
    """What all requests share."""

    def __init__(self, origins: list[str]) -> None:
        self.origins = origins
        self.sessions: set[str] = set()
        self.pongs: list[Any] = []  # ids of the questions that clients have answered
        self.has_pong = threading.Event()
        self.cancelled: list[Any] = []  # ids of requests


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""

    def do_OPTIONS(self) -> None:
        allowed = {
            "access-control-allow-headers": "*",
            "access-control-allow-methods": "POST, DELETE",
        }
        self._answer(204, b"", allowed)

    def do_DELETE(self) -> None:
        self.state.sessions.discard(self.headers.get(SESSION, ""))
        self._answer(204, b"")

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if message.get("method") == "initialize":
            session = secrets.token_hex(8)
            self.state.sessions.add(session)
            result = {"protocolVersion": VERSION, "capabilities": {"tools": {}}}
            result["serverInfo"] = {"name": "written", "version": "1"}
            self._json(message["id"], {"result": result}, {SESSION: session})
            return
        named = self.headers.get(SESSION)
        if named is None or self.headers.get("mcp-protocol-version") != VERSION:
            self._answer(400, b"")
        elif named not in self.state.sessions:
            self._answer(404, b"")
        else:
            self._served(message)

    def _served(self, message: dict[str, Any]) -> None:
        method = message.get("method")
        params = message.get("params", {})
        if "id" not in message or method is None:
            if method == "notifications/cancelled":
                self.state.cancelled.append(params["requestId"])
            if method is None:
                self.state.pongs.append(message["id"])
                self.state.has_pong.set()
            self._answer(202, b"")
        elif method == "tools/list":
            self._list(message["id"], params.get("cursor"))
        else:
            self._call(message["id"], params["name"], params.get("arguments", {}))

    def _list(self, id: Any, cursor: str | None) -> None:
        """Two pages."""
        names = TOOLS[2:] if cursor == "rest" else TOOLS[:2]
        tools = [{"name": name, "description": name, "inputSchema": SCHEMA} for name in names]
        result: dict[str, Any] = {"tools": tools}
        if cursor is None:
            result["nextCursor"] = "rest"
        self._json(id, {"result": result})

    def _call(self, id: Any, name: str, given: dict[str, Any]) -> None:
        if name not in TOOLS:
            self._json(id, {"error": {"code": UNKNOWN_TOOL, "message": f"no tool {name}"}})
            return
        self._begin_stream()
        if name == "die":
            os._exit(1)
        if name == "wait":
            threading.Event().wait(WAIT_S)
        if name == "add":
            # A question with the id that the call has, too: both sides count for themselves.
            self._event({"id": id, "method": "ping"})
            self.state.has_pong.wait(WAIT_S)
            self._event({"method": "notifications/progress", "params": {}})
            text = str(given["a"] + given["b"])
        elif name == "cancelled":
            text = json.dumps(self.state.cancelled)
        else:
            text = str(given.get("words", "waited"))
        content = [{"type": "text", "text": text}]
        self._event({"id": id, "result": {"content": content, "isError": name == "fail"}})
        self.close_connection = True

    # ---- HTTP

    def _begin_stream(self) -> None:
        self.send_response(200)
        self._allow()
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(b"id: 0\r\ndata: \r\n\r\n")  # to begin again from there

    def _event(self, message: dict[str, Any]) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message})
        self.wfile.write(f"event: message\r\ndata: {data}\r\n\r\n".encode())
        self.wfile.flush()

    def _json(self, id: Any, rest: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        body = json.dumps({"jsonrpc": "2.0", "id": id, **rest}).encode()
        self._answer(200, body, {"content-type": "application/json", **(headers or {})})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self._allow()
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _allow(self) -> None:
        origin = self.headers.get("origin", "")
        if origin in self.state.origins:
            self.send_header("access-control-allow-origin", origin)
            self.send_header("access-control-expose-headers", SESSION)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """A client that has left is none of ours."""


def main() -> None:
    Handler.state = State(sys.argv[2:])
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()


if __name__ == "__main__":
    main()

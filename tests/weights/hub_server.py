"""A server that speaks the protocol of the Hugging Face hub: lists of repositories, redirects to
another host for large files, ranges, tags, gated repositories, limits of requests, cut connections.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + 34 * "0"
REPO = "org/small"
WEIGHTS = "model.safetensors"
LARGE = 1_000  # bytes from which a file is a large one, with a digest and on another host


def content(number: int, num_bytes: int = 300_000) -> bytes:
    return bytes((number + i * i) % 251 for i in range(num_bytes))


@dataclass
class Hub:
    """The repositories, what goes wrong, and what was asked."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    token: str = "hf_right"
    endpoint: str = ""
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    # By path of a file: called with the number of the try and the bytes to be sent; what it returns
    # is sent, and then the connection is cut if it is shorter.
    cut: dict[str, Callable[[int, bytes], bytes]] = field(default_factory=dict)
    # By path: statuses of the first answers, each with its header Retry-After.
    refusals: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    ignores_ranges: bool = False
    corrupt: set[str] = field(default_factory=set)  # files that come with wrong bytes, always
    listed_as: dict[str, str] = field(default_factory=dict)  # other names in lists
    waits_for: dict[str, threading.Event] = field(default_factory=dict)
    began: dict[str, threading.Event] = field(default_factory=dict)

    def etag(self, content: bytes) -> str:
        if len(content) >= LARGE:
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def ranges_of(self, path: str) -> list[str]:
        """The ranges of all requests for the content of a file; "": the whole file."""
        return [
            headers.get("range", "")
            for url, headers in self.requests
            if url.startswith("GET") and url.endswith(path) and "/api/" not in url
        ]


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        for event in hub.waits_for.values():
            event.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        hub = self.hub
        path = unquote(urlsplit(self.path).path).strip("/")
        headers = {name.lower(): value for name, value in self.headers.items()}
        hub.requests.append((f"{self.command} {path}", headers))
        refusals = hub.refusals.get(path, [])
        if refusals:
            status, retry_after = refusals.pop(0)
            more = {"Retry-After": retry_after} if retry_after else {}
            self._send(status, b"busy", more)
        elif path.startswith("api/models/"):
            self._list(path.removeprefix("api/models/").partition("/revision/")[0], headers)
        elif "/resolve/" in path:
            repo, _, rest = path.partition("/resolve/")
            self._resolve(repo, rest.partition("/")[2], headers)
        elif path.startswith("cdn/"):
            repo, _, name = path.removeprefix("cdn/").partition("//")
            self._content(name, hub.repos[repo][name], headers)
        else:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})

    def _may_see(self, repo: str, headers: dict[str, str]) -> bool:
        if repo not in self.hub.repos:
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
            return False
        if repo in self.hub.gated and headers.get("authorization") != f"Bearer {self.hub.token}":
            status = 403 if "authorization" in headers else 401
            self._send(status, b"gated", {"X-Error-Code": "GatedRepo"})
            return False
        return True

    def _list(self, repo: str, headers: dict[str, str]) -> None:
        if not self._may_see(repo, headers):
            return
        siblings = []
        for name, content in self.hub.repos[repo].items():
            one: dict[str, Any] = {"rfilename": self.hub.listed_as.get(name, name)}
            one |= {"size": len(content), "blobId": self.hub.etag(content)}
            if len(content) >= LARGE:
                digest = self.hub.etag(content)
                one["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 130}
            siblings.append(one)
        listed = {"id": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
        self._send(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})

    def _resolve(self, repo: str, name: str, headers: dict[str, str]) -> None:
        if not self._may_see(repo, headers):
            return
        content = self.hub.repos[repo][name]
        known = {"ETag": f'"{self.hub.etag(content)}"', "X-Repo-Commit": COMMIT}
        if len(content) < LARGE:
            self._content(name, content, headers, known)
            return
        # Another host, which must not see the token.
        port = self.hub.endpoint.rpartition(":")[2]
        target = f"http://localhost:{port}/cdn/{repo}//{name}"
        self._send(302, b"", known | {"Location": target})

    def _content(
        self,
        name: str,
        content: bytes,
        headers: dict[str, str],
        known: dict[str, str] | None = None,
    ) -> None:
        hub = self.hub
        hub.counts[name] += 1
        whole = len(content)
        if name in hub.corrupt:
            content = bytes(byte ^ 1 for byte in content)
        begin = 0
        status = 200
        more = dict(known or {})
        asked = headers.get("range", "")
        if asked and not hub.ignores_ranges:
            begin = int(asked.removeprefix("bytes=").partition("-")[0])
            if begin >= whole:
                self._send(416, b"", {"Content-Range": f"bytes */{whole}"})
                return
            status = 206
            more["Content-Range"] = f"bytes {begin}-{whole - 1}/{whole}"
        data = content[begin:]
        sent = data
        if name in hub.cut:
            sent = hub.cut[name](hub.counts[name], data)
        self.send_response(status)
        for header, value in (more | {"Content-Length": str(len(data))}).items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        half = len(sent) // 2
        self.wfile.write(sent[:half])
        self.wfile.flush()
        if name in hub.began:
            hub.began[name].set()
        if name in hub.waits_for:
            hub.waits_for[name].wait()
        try:
            self.wfile.write(sent[half:])
        except OSError:  # the client is gone
            self.close_connection = True
        if len(sent) < len(data):
            self.close_connection = True

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

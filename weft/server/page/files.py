"""The files of the live page, read once from the package, with digests as their ETags.

They contain no data of this server. Their policy allows a browser to run code and send requests
only from and to this server; the operator can name origins of MCP servers that the page may call.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
GZIP_LEVEL = 6


def policy(origins: Sequence[str] = ()) -> str:
    """The Content-Security-Policy of the page, which may send requests to these `origins`, too."""
    reached = " ".join(("'self'", *origins))
    return (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        f"connect-src {reached}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )


class PageFile:
    """One file, as it is and compressed."""

    def __init__(self, body: bytes, headers: Mapping[str, str]) -> None:
        self.body = body
        self.headers = headers

    @cached_property
    def packed(self) -> bytes:
        """Compressed by gzip, when a browser asks for the first time."""
        return gzip.compress(self.body, GZIP_LEVEL, mtime=0)

    def is_known(self, tags: str) -> bool:
        """Whether one of the `tags` of If-None-Match is the tag of this file."""
        known = {tag.strip().removeprefix("W/") for tag in tags.split(",")}
        return self.headers["etag"] in known or "*" in known


def read_files() -> dict[str, PageFile]:
    """The files by their paths in the folder."""
    found = {}
    for path in sorted(FOLDER.rglob("*")):
        kind = TYPES.get(path.suffix)
        if kind is None:
            continue
        body = path.read_bytes()
        headers = {
            "content-type": kind,
            "etag": f'"{hashlib.sha256(body).hexdigest()[:20]}"',
            "cache-control": "no-cache",  # cached, and revalidated at each use
            "content-security-policy": policy(),
            "cross-origin-opener-policy": "same-origin",
            "referrer-policy": "no-referrer",
        }
        found[path.relative_to(FOLDER).as_posix()] = PageFile(body, headers)
    return found

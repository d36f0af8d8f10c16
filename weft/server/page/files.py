"""The files of the live page, read once from the package, with digests as their ETags.

They contain no data of this server. Their policy allows a browser to run code and send requests
only from and to this server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


class PageFile(NamedTuple):
    body: bytes
    headers: Mapping[str, str]

    def is_known(self, tags: str) -> bool:
        """Whether one of the `tags` of If-None-Match is the tag of this file."""
        known = {tag.strip().removeprefix("W/") for tag in tags.split(",")}
        return self.headers["etag"] in known or "*" in known


def read_files() -> dict[str, PageFile]:
    """The files by name."""
    found = {}
    for path in sorted(FOLDER.iterdir()):
        kind = TYPES.get(path.suffix)
        if kind is None:
            continue
        body = path.read_bytes()
        headers = {
            "content-type": kind,
            "etag": f'"{hashlib.sha256(body).hexdigest()[:20]}"',
            "cache-control": "no-cache",  # cached, and revalidated at each use
            "content-security-policy": POLICY,
            "cross-origin-opener-policy": "same-origin",
            "referrer-policy": "no-referrer",
        }
        found[path.name] = PageFile(body, headers)
    return found

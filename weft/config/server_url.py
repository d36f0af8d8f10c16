"""URLs of servers that speak HTTP, as the command line names them. Knows no connections."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

from weft.config.options import SettingsError

NO_PART_OF_A_URL = re.compile(r"[\s\x00-\x1f\x7f]")


def url_parts(url: str) -> SplitResult | None:
    """The parts of a URL of HTTP; None: it is no such URL, or its host cannot be looked up."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError for an invalid port
        host = parts.hostname or ""
        host.encode("idna")  # raises ValueError for a name that cannot be looked up, as a..b
    except ValueError:
        return None
    return parts if host and parts.scheme in ("http", "https") else None


def server_url(name: str, url: str) -> SplitResult:
    """The parts of `url`; without a scheme, it is taken for HTTP. `name` is what the error calls
    the URL. Raises SettingsError."""
    parts = url_parts(url if "://" in url else f"http://{url}")
    if parts is None or NO_PART_OF_A_URL.search(url):
        raise SettingsError(f"{name} is {url!r}; something like http://127.0.0.1:30000 is expected")
    if parts.username is not None:
        raise SettingsError(f"{name} may not contain a user or a key; --api-key names a key")
    return parts

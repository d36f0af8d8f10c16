"""Lists of origins in settings, as scheme, host and port. Knows no requests."""

from __future__ import annotations

import re

ORIGIN = re.compile(r"https?://(?:[A-Za-z0-9.\-]+|\[[0-9a-fA-F:]+\])(?::\d{1,5})?")


def origins_of(text: str) -> list[str]:
    """The origins of a list with commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def why_no_origins(text: str) -> str:
    """The fault of such a list; "" if it has none."""
    for origin in origins_of(text):
        if ORIGIN.fullmatch(origin) is None:
            return f"{origin!r} is no origin; SCHEME://HOST:PORT is expected, without a path"
    return ""

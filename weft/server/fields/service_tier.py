"""The field `service_tier`: whether a request is done when others leave room for it.

`flex` makes a background request (`scheduler/background/`). The other values of OpenAI and
Anthropic ask for nothing that one server has in two kinds.
"""

from __future__ import annotations

from weft.server.errors import ApiError

BACKGROUND = "flex"
ONLINE = ("auto", "default", "priority", "scale", "standard_only")


def is_background(tier: str | None) -> bool:
    """Whether a request with this `service_tier` is a background request. Raises `ApiError`."""
    if tier is None or tier in ONLINE:
        return False
    if tier == BACKGROUND:
        return True
    allowed = ", ".join((BACKGROUND, *ONLINE))
    raise ApiError(400, f"service_tier is {tier[:40]!r}; allowed: {allowed}", param="service_tier")

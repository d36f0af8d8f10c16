"""What a request says of a prompt that one server computes, and another one continues."""

from __future__ import annotations

import msgspec


class HandoffParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the two servers meet.

    The one that computes the prompt keeps its KV under the name of the room; the other one asks
    `host` and `port` for it.
    """

    room: str
    host: str = ""
    port: int = 0

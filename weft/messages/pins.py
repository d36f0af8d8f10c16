"""Pins: prefixes of prompts that stay in the prefix cache for a while, whatever else is cached."""

from __future__ import annotations

import msgspec

from weft.messages.calls import ControlRequest, SuccessReply


class PinMark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first `length` tokens of a request's prompt are to stay, for `ttl_s` from their last
    use by a request that marks them."""

    length: int
    ttl_s: float
    name: str = ""  # nothing: the engine makes one up, and others may take its place


class PinStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One pin, as `GET /cache` lists it."""

    name: str
    tenant: str  # whose it is
    tokens: int  # whole pages
    state: str  # firm; gives way: its memory may be taken now; else why its KV is not there
    ttl_s: float
    expires_in_s: float  # unless it is used before
    uses: int  # requests that have marked it


class UnpinReply(SuccessReply):
    tokens: int = 0  # that are not pinned any more


class Unpin(ControlRequest[UnpinReply]):
    """Let a pin of this name go. Its KV stays in the prefix cache until its memory is needed."""

    name: str

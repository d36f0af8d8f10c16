"""Pins: prefixes of prompts that the prefix cache keeps for a while, in preference to the rest."""

from __future__ import annotations

import msgspec

from weft.messages.calls import ControlRequest, SuccessReply


class PinMark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Keep the first `length` tokens of a request's prompt, until `ttl_s` after the last request
    that marks them."""

    length: int
    ttl_s: float
    name: str = ""  # "": the engine chooses a name, and other pins may replace this one


class PinStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One pin, as `GET /cache` lists it."""

    name: str
    tenant: str  # owner of the pin
    tokens: int  # in complete pages
    state: str  # "firm"; "gives way": it may be evicted now; else the reason why its KV is missing
    ttl_s: float
    expires_in_s: float  # if it is not used before
    uses: int  # requests that have marked it


class ToolPause(msgspec.Struct, frozen=True, kw_only=True, tag="tool_pause"):
    """A request with `may_pause` has ended with calls of these tools, so its client will come back
    with their results. Unknown ids are ignored."""

    id: int
    tools: tuple[str, ...]


class UnpinReply(SuccessReply):
    tokens: int = 0  # tokens that are not pinned any more


class Unpin(ControlRequest[UnpinReply]):
    """Remove the pin of this name. Its KV stays in the prefix cache until its memory is needed."""

    name: str

"""The HTTP request that the running task works on: its name, its arrival time, and what the front
has spent time on for it.

The HTTP edge of the server sets it. Log lines and traces take the name of the request from here, so
that no function in between has to pass it on. Where requests wait for threads, `text/turns.py`
orders them by the tenant from here. Nothing else may depend on it: the answer to a request is the
same without it.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestContext:
    rid: str
    arrived_s: float  # time.perf_counter
    traceparent: str = ""  # W3C header, as received
    tenant: str = ""  # a name for the key, or the address of a client without a key
    # The server that had more of the prompt, in the words of the front that has chosen this one
    # (`weft route`); empty: none.
    elsewhere: str = ""
    # Seconds so far by what the front has spent them on, in order: docs/guides/observability.md has
    # the names. No moment is in two of them.
    spent: dict[str, float] = field(default_factory=dict)
    is_in_engine: bool = False  # an engine has, or had, it


current: ContextVar[RequestContext | None] = ContextVar("weft_call", default=None)


def rid() -> str:
    """The name of the current request; empty if there is none."""
    call = current.get()
    if call is None:
        return ""
    return call.rid


def tenant() -> str:
    """The tenant of the current request; empty if it did not come over HTTP."""
    call = current.get()
    if call is None:
        return ""
    return call.tenant


def spent(part: str, since_s: float) -> None:
    """The current request has spent the time since then (time.perf_counter) on this."""
    call = current.get()
    if call is not None:
        call.spent[part] = call.spent.get(part, 0.0) + time.perf_counter() - since_s


def rename(name: str) -> None:
    """Use the name that the request has in its body.

    A name that a header could not carry is ignored.
    """
    call = current.get()
    if call is not None and is_safe_name(name):
        call.rid = name


def is_safe_name(name: str) -> bool:
    """Whether a name can be used unchanged in headers and logs."""
    return bool(name) and name.isascii() and name.isprintable() and " " not in name

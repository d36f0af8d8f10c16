"""The HTTP request that the running task works on: its name, its arrival time, and how long the
front has worked on it.

The HTTP edge of the server sets it. Log lines and traces take the name of the request from here, so
that no function in between has to pass it on. Where requests wait for threads, `text/turns.py`
orders them by the tenant from here. Nothing else may depend on it: the answer to a request is the
same without it.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class RequestContext:
    rid: str
    arrived_s: float  # time.perf_counter
    traceparent: str = ""  # W3C header, as received
    tenant: str = ""  # a name for the key, or the address of a client without a key
    # The server that had more of the prompt, in the words of the front that has chosen this one
    # (`weft route`); empty: none.
    elsewhere: str = ""
    # Seconds so far that the front has spent on
    read_s: float = 0.0  # receiving the body
    parse_s: float = 0.0  # decoding and checking the body
    render_s: float = 0.0  # the chat template
    tokenize_s: float = 0.0


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

"""The HTTP request that the running task works on: its name, and when it came.

The edge of the server sets it; log lines and traces about the request take its name from here, so
that no function in between has to pass it on. Whose turn it is where requests wait for threads
(`text/turns.py`) goes by its tenant.
Nothing else may depend on it: a request is answered the same without.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class RequestContext:
    rid: str
    arrived_s: float  # time.perf_counter
    traceparent: str = ""  # W3C header, as it came
    tenant: str = ""  # who asks: a name for the key, or the address of a client without one


current: ContextVar[RequestContext | None] = ContextVar("weft_call", default=None)


def rid() -> str:
    """The name of the request that is being worked on; empty if there is none."""
    call = current.get()
    if call is None:
        return ""
    return call.rid


def tenant() -> str:
    """Who asked for what is being worked on; empty if it did not come over HTTP."""
    call = current.get()
    if call is None:
        return ""
    return call.tenant


def rename(name: str) -> None:
    """The request has named itself in its body.

    A name that no header could carry is not taken over.
    """
    call = current.get()
    if call is not None and is_safe_name(name):
        call.rid = name


def is_safe_name(name: str) -> bool:
    """Whether a name may stand in headers and logs as it is."""
    return bool(name) and name.isascii() and name.isprintable() and " " not in name

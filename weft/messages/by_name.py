"""Control requests by name: for the RPC socket, `POST /rpc` and `weft ctl rpc`.

The name of a request is the tag of its message, its parameters are the fields. So exactly the
control requests can be called by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from weft.json_types import JsonObject
from weft.messages.calls import ControlReply, ControlRequest
from weft.messages.codec import REQUESTS
from weft.messages.wrong_field import converted_field


class BadCall(ValueError):
    """There is no such request, or its parameters are wrong; the message is for the user."""


def request_named(name: str, params: Mapping[str, Any]) -> ControlRequest[Any]:
    """The control request of this name with these fields. Raises `BadCall`."""
    kind = REQUESTS.get(name)
    if kind is None:
        raise BadCall(f"there is no method {name[:64]!r}; the methods are {', '.join(REQUESTS)}")
    for param in params:
        if param not in parameters(kind):
            known = ", ".join(parameters(kind)) or "none"
            raise BadCall(f"{name}: there is no field {param[:64]!r}; its fields are: {known}")
    try:
        request: ControlRequest[Any] = msgspec.convert(dict(params), kind)
    except msgspec.ValidationError as exc:
        wrong = converted_field(exc, dict(params), kind)
        raise BadCall(f"{name}: {wrong.text}") from exc
    return request


def parameters(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """The fields of a control message, except the number of the call, which the sender sets."""
    return tuple(field for field in kind.__struct_fields__ if field != "call")


def plain(reply: ControlReply) -> JsonObject:
    """A reply as plain values, including those that are equal to their defaults."""
    return {name: msgspec.to_builtins(getattr(reply, name)) for name in parameters(type(reply))}


def methods() -> dict[str, str]:
    """Every name that can be called, with a short description."""
    found = {}
    for name, kind in REQUESTS.items():
        about = (kind.__doc__ or "").partition("\n\n")[0]
        found[name] = " ".join(about.split())
    return found

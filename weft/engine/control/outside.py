"""The handler of control requests from outside of weft: it finds the plugin, and calls its own."""

from __future__ import annotations

import msgspec

from weft.config.plugins import PluginError, load_object, refused
from weft.engine.services import Services
from weft.messages.outside import CallOutside, CallOutsideReply, OutsideControl


def own_control(name: str) -> OutsideControl:
    """The plugin of this name. Raises SettingsError."""
    try:
        found = load_object(name, "weft.control")
    except PluginError as exc:
        raise refused("control", name, f"cannot be used: {exc}") from exc
    if not isinstance(found, OutsideControl):
        raise refused("control", name, "is no weft.messages.outside.OutsideControl")
    return found


def call_outside(
    services: Services,
    message: CallOutside,
) -> CallOutsideReply:
    settings = services.scheduler.settings
    if message.name not in settings.outside_control:
        named = ", ".join(settings.outside_control) or "none"
        return CallOutsideReply(wrong=f"there is no {message.name[:64]!r}; --plugins has {named}")
    own = own_control(message.name)
    try:
        asked = msgspec.msgpack.decode(message.body, type=own.message)
        reply = own.handler(services, asked)
    except ValueError as exc:  # also of a field that is wrong
        return CallOutsideReply(wrong=str(exc))
    if not isinstance(reply, msgspec.Struct):
        raise TypeError(f"{message.name} returned {type(reply).__name__}, and no msgspec.Struct")
    return CallOutsideReply(body=msgspec.msgpack.encode(reply))

"""Control requests from outside of weft: one message carries them all, so that decoders, journals
and calls by name need not know them.

    OWN = OutsideControl(message=Count, handler=count, summary="Count the requests")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from weft.messages.calls import ControlReply, ControlRequest, tag_of


@dataclass(frozen=True, kw_only=True)
class OutsideControl:
    """A control request: all that weft knows about it.

    `handler` gets the engine's services and the message, and returns a `msgspec.Struct`, in the
    engine. It never waits, and reads the time only from the services. An exception that it raises
    is the answer 500, a ValueError the answer 400 with its text; either way no request ends.
    """

    message: type[msgspec.Struct]  # the body of the route
    handler: Callable[[Any, Any], msgspec.Struct]
    summary: str  # in the list of routes, and of commands
    path: str = ""  # of the route, POST; "": /NAME, from the name of the message
    command: str = ""  # of `weft ctl`; "": from the path
    # Whether an engine that is started again gets the last one that all engines have carried out.
    is_kept: bool = False

    @property
    def route(self) -> str:
        return self.path or f"/{tag_of(self.message.__name__)}"

    @property
    def words(self) -> str:
        return self.command or self.route.strip("/").replace("_", "-").replace("/", " ")


class CallOutsideReply(ControlReply):
    body: bytes = b""  # the reply of the handler, as msgpack
    wrong: str = ""  # why the message cannot be met


class CallOutside(ControlRequest[CallOutsideReply]):
    """Carry out a control request from outside."""

    name: str  # of the plugin, as --plugins has it
    body: bytes = b"\x80"  # its message, as msgpack

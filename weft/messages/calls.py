"""The base classes of control requests and their replies: a message declares itself by inheriting.

    class SetPolicy(ControlRequest[SetPolicyReply]):
        policy: str

This declaration gives the message its tag ("set_policy"), adds it to the decoders of `codec.py`,
makes it callable by name, and types `EngineClient.call`: the reply to a `SetPolicy` is a
`SetPolicyReply`. There is no other list of messages: the registry is Python's tree of subclasses.
This module knows no single message.
"""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar, dataclass_transform, get_args

import msgspec

# Between a lowercase letter and a capital, and before the last of several capitals:
# Freeze|GC|Reply.
_WORD_END = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def tag_of(name: str) -> str:
    """The tag of a message from the name of its class: FreezeGC becomes freeze_gc."""
    return _WORD_END.sub("_", name).lower()


# Structs inherit options like `frozen` from their base. The metaclass tells type checkers so, which
# would otherwise demand `frozen=True` at every message.
@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class MessageMeta(msgspec.StructMeta):
    pass


class ControlReply(
    msgspec.Struct,
    metaclass=MessageMeta,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag=tag_of,
):
    """Answers one control request."""

    call: int = 0  # number of the request; the engine sets it


class SuccessReply(ControlReply, kw_only=True):
    """A reply that says whether the request was carried out."""

    success: bool
    message: str = ""  # the reason of a failure, or other information


class CallFailed(ControlReply):
    """The reply to any control request on which the engine failed."""

    message: str
    status: int = 500  # as an HTTP status; 503: it may be tried again


R = TypeVar("R", bound=ControlReply)
R_co = TypeVar("R_co", bound=ControlReply, covariant=True)


class ControlRequest(
    msgspec.Struct,
    Generic[R_co],
    metaclass=MessageMeta,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag=tag_of,
):
    """Asks a running engine for something, or changes it.

    Its reply is an `R_co` or a `CallFailed`.
    """

    call: int = 0  # the sender's number of the request; its reply has the same number


def control_requests() -> dict[str, type[ControlRequest[Any]]]:
    """All declared control requests, by their tags, in the order of the tags."""
    return {_tag(kind): kind for kind in sorted(_declared(ControlRequest), key=_tag)}


def control_replies() -> list[type[ControlReply]]:
    """All declared replies."""
    return _declared(ControlReply)


def reply_type(request: type[ControlRequest[R]]) -> type[R]:
    """The type of the replies to `request`."""
    for kind in request.__mro__:
        for base in getattr(kind, "__orig_bases__", ()):
            for argument in get_args(base):
                if isinstance(argument, type):
                    found: type[R] = argument
                    return found
    raise TypeError(f"{request.__name__} does not say what answers it")


def _declared(base: type[Any]) -> list[type[Any]]:
    """The leaves of the tree of subclasses: a class with subclasses is not a message itself."""
    below = base.__subclasses__()
    if not below:
        return [base]
    return [leaf for one in below for leaf in _declared(one)]


def _tag(kind: type[msgspec.Struct]) -> str:
    tag = kind.__struct_config__.tag
    assert isinstance(tag, str), f"{kind.__name__} has no tag"
    return tag

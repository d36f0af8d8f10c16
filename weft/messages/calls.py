"""The bases of control requests and their replies: a message declares itself by inheriting.

    class SetPolicy(ControlRequest[SetPolicyReply]):
        policy: str

That one declaration gives the message its tag ("set_policy"), puts it into the decoders of
`codec.py`, makes it callable by name, and types `EngineClient.call`: a `SetPolicy` is answered by a
`SetPolicyReply`. No list of messages is written besides: the registry is the tree of subclasses
that Python keeps. This module knows no single message.
"""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar, dataclass_transform, get_args

import msgspec

# Between a small letter and a capital, and before the last capital of several: Freeze|GC|Reply.
_WORD_END = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def tag_of(name: str) -> str:
    """The tag of a message from the name of its class: FreezeGC becomes freeze_gc."""
    return _WORD_END.sub("_", name).lower()


# Structs inherit how they are made, frozen and all, from their base. The metaclass says so to type
# checkers, which would want `frozen=True` at every message.
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

    call: int = 0  # number of the request; the engine puts it in


class SuccessReply(ControlReply, kw_only=True):
    """A reply that says whether the request was carried out."""

    success: bool
    message: str = ""  # why not, or what else there is to know


class CallFailed(ControlReply):
    """Answers any control request that could not be carried out because the engine failed on it."""

    message: str


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

    An `R_co` answers it, or a `CallFailed`.
    """

    call: int = 0  # the sender's number for the request; its reply carries the same


def control_requests() -> dict[str, type[ControlRequest[Any]]]:
    """Every control request that has been declared, by its tag, in the order of the tags."""
    return {_tag(kind): kind for kind in sorted(_declared(ControlRequest), key=_tag)}


def control_replies() -> list[type[ControlReply]]:
    """Every reply that has been declared."""
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
    """The leaves of the tree of subclasses: what others inherit from is no message itself."""
    below = base.__subclasses__()
    if not below:
        return [base]
    return [leaf for one in below for leaf in _declared(one)]


def _tag(kind: type[msgspec.Struct]) -> str:
    tag = kind.__struct_config__.tag
    assert isinstance(tag, str), f"{kind.__name__} has no tag"
    return tag

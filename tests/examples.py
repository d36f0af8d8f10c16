"""The least value of any type that a message has, and structs made of such."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec


def something(type_: Any) -> Any:
    """A value of this type: the least one."""
    origin = typing.get_origin(type_)
    if origin in (typing.Union, types.UnionType):
        return something(typing.get_args(type_)[0])
    if origin is typing.Literal:
        return typing.get_args(type_)[0]
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        return example_of(type_)
    if type_ is bytes:
        return bytes(4)
    return (origin or type_)() if type_ is not type(None) else None


def example_of(kind: type[msgspec.Struct], **known: Any) -> Any:
    """A struct with something in every field that must be given."""
    hints = typing.get_type_hints(kind)
    fields = [
        field.name
        for field in msgspec.structs.fields(kind)
        if field.required and field.name not in known
    ]
    return kind(**known, **{name: something(hints[name]) for name in fields})

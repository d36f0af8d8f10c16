"""Reads values of a GGUF file's metadata one by one. Knows no key."""

from __future__ import annotations

from typing import TypeVar

from weft.config.model_errors import BadCheckpoint
from weft.config.numbers import shown
from weft.json_types import JsonMapping

T = TypeVar("T")


def metadata_value(
    label: str, metadata: JsonMapping, key: str, kind: type[T], default: T | None = None
) -> T:
    """The value of a key; the default if it is missing. Without a default the key is required.
    `label`: the file for users. Raises BadCheckpoint."""
    value = metadata.get(key)
    if value is None:
        if default is None:
            raise BadCheckpoint(f"{label} has no {key} in its metadata")
        return default
    if type(value) is not kind:
        raise BadCheckpoint(
            f"{label}: {key} is {shown(value)}; it must be given as {kind.__name__}"
        )
    return value

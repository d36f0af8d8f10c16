"""Sends the values of pictures, videos and sounds beside their message, each in its own frame. So
they are not copied into and out of the message, which would take long at both ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from msgspec.structs import replace

from weft.messages.codec import BadMessage
from weft.messages.media import MediaItem
from weft.messages.requests import BatchGenerate, GenerateRequest

T = TypeVar("T")


def take_values(message: T) -> tuple[T, list[bytes]]:
    """`message` without the values of its media, and these values in order. A message without media
    is returned unchanged."""
    values: list[bytes] = []
    if isinstance(message, GenerateRequest) and message.media:
        return replace(message, media=_without(message.media, values)), values
    if isinstance(message, BatchGenerate) and message.media:
        media = {index: _without(items, values) for index, items in message.media.items()}
        return replace(message, media=media), values
    return message, values


def put_values(message: T, values: Sequence[bytes]) -> T:
    """Undo `take_values`. Raises `BadMessage` if message and values do not belong together."""
    rest = iter(values)
    if isinstance(message, GenerateRequest):
        message = replace(message, media=_with(message.media, rest))
    elif isinstance(message, BatchGenerate):
        media = {index: _with(items, rest) for index, items in message.media.items()}
        message = replace(message, media=media)
    if next(rest, None) is not None:
        raise BadMessage("there are more values than media")
    return message


def _without(items: Sequence[MediaItem], values: list[bytes]) -> tuple[MediaItem, ...]:
    values += [item.values for item in items]
    return tuple(replace(item, values=b"") for item in items)


def _with(items: Sequence[MediaItem], values: Iterator[bytes]) -> tuple[MediaItem, ...]:
    found: list[MediaItem] = []
    for item in items:
        own = next(values, None)
        if own is None:
            raise BadMessage("there are fewer values than media")
        found.append(replace(item, values=own))
    return tuple(found)

"""`cache_control`: marks of the prefixes of a prompt that stay cached, as in Anthropic's API, and
as LiteLLM and OpenRouter send them with chat requests.

A mark belongs to a block: the prompt up to the end of this block stays cached. To find that end in
the tokens, the conversation is rendered a second time with an extra text after the block: the two
renderings are equal up to there, whatever the template does with the rest. This module knows no
API.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

from weft.messages.wrong_field import converted_field
from weft.server.errors import ApiError

B = TypeVar("B")
Ttl = Literal["5m", "1h"]
TTL_S: dict[str, float] = {"5m": 300.0, "1h": 3_600.0}
MAX_MARKS = 4


class CacheControl(msgspec.Struct, kw_only=True):
    type: Literal["ephemeral"]
    ttl: Ttl | None = None

    @property
    def lasts(self) -> Ttl:
        return self.ttl or "5m"


class CacheMark(NamedTuple, Generic[B]):
    """A marked block. `varied`: builds the same body with a text added after the block."""

    where: str  # position of the block in its API's notation: messages.0.content.1
    lasts: Ttl
    varied: Callable[[str], B]


def control_of(value: Any, where: str) -> CacheControl | None:
    """The `cache_control` of an object that was not decoded yet. Raises `ApiError`."""
    if value is None:
        return None
    try:
        return msgspec.convert(value, CacheControl)
    except msgspec.ValidationError as exc:
        wrong = converted_field(exc, value, CacheControl, f"{where}.cache_control")
        raise ApiError(400, wrong.text, param=wrong.name) from exc


def with_last(
    marks: Sequence[CacheMark[B]], of_body: CacheControl | None, last: CacheMark[B] | None
) -> list[CacheMark[B]]:
    """The marks of a body, in the order of its prompt, including the mark of the whole body.

    `of_body`: the `cache_control` of the body, which marks its last block; `last`: that mark.

    Raises `ApiError` for marks that exclude each other.
    """
    found = list(marks)
    if of_body is not None and last is not None:
        is_marked = bool(marks) and marks[-1].where == last.where
        if not is_marked:
            found.append(last)
        elif marks[-1].lasts != of_body.lasts:
            message = (
                f"cache_control: its ttl is {of_body.lasts!r}, and that of the last block "
                f"({last.where}) is {marks[-1].lasts!r}"
            )
            raise ApiError(400, message, param="cache_control")
    if len(found) > MAX_MARKS:
        message = (
            f"A maximum of {MAX_MARKS} blocks with cache_control may be provided. "
            f"Found {len(found)}."
        )
        raise ApiError(400, message, param="cache_control")
    seen_short = False
    for mark in found:
        if mark.lasts == "1h" and seen_short:
            param = f"{mark.where}.cache_control.ttl"
            message = (
                f"{param}: a ttl='1h' cache_control block must not come after a ttl='5m' "
                "cache_control block. Note that blocks are processed in the following order: "
                "`tools`, `system`, `messages`."
            )
            raise ApiError(400, message, param=param)
        seen_short = seen_short or mark.lasts == "5m"
    return found


def require_text(text: str | None, where: str) -> None:
    """Raise `ApiError` for a mark on a block without text."""
    if not text:
        message = f"{where}: cache_control cannot be set for empty text blocks"
        raise ApiError(400, message, param=where)


def new_stamp() -> str:
    """A text that no prompt contains."""
    return f"\ue000{secrets.token_hex(8)}\ue000"


def num_alike(left: Sequence[Any], right: Sequence[Any]) -> int:
    """The length of the common prefix of two sequences."""
    same = 0
    differ = min(len(left), len(right)) + 1
    # One comparison of slices is faster than many comparisons of items.
    while differ - same > 1:
        middle = (same + differ) // 2
        if left[same:middle] == right[same:middle]:
            same = middle
        else:
            differ = middle
    return same

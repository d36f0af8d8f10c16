"""`cache_control`: which beginnings of a prompt are to stay cached, as Anthropic's API has it, and
LiteLLM and OpenRouter send it with chat requests.

A mark stands at a block: the prompt up to its end is to stay. To find that end in the tokens, the
conversation is rendered a second time, with a text of our own behind the block: up to there the two
are alike, whatever the template does with what follows. Nothing here knows an API.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

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
    """A block that is marked. `varied`: the same body, with a text put behind the block."""

    where: str  # of the block, as its API names it: messages.0.content.1
    lasts: Ttl
    varied: Callable[[str], B]


def control_of(value: Any, where: str) -> CacheControl | None:
    """What an object that nobody has decoded says. Raises `ApiError`."""
    if value is None:
        return None
    try:
        return msgspec.convert(value, CacheControl)
    except msgspec.ValidationError as exc:
        param = f"{where}.cache_control"
        raise ApiError(400, f"{param}: {exc}", param=param) from exc


def with_last(
    marks: Sequence[CacheMark[B]], whole: CacheControl | None, last: CacheMark[B] | None
) -> list[CacheMark[B]]:
    """The marks of a body, in the order of its prompt, with what it says for its last block as a
    whole (`last`, as if it were marked). Raises `ApiError` for marks that exclude each other."""
    found = list(marks)
    if whole is not None and last is not None:
        is_marked = bool(marks) and marks[-1].where == last.where
        if not is_marked:
            found.append(last)
        elif marks[-1].lasts != whole.lasts:
            message = (
                f"cache_control: its ttl is {whole.lasts!r}, and that of the last block "
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
    """A text that stands in no prompt."""
    return f"\ue000{secrets.token_hex(8)}\ue000"


def num_alike(left: Sequence[Any], right: Sequence[Any]) -> int:
    """How many of the first items of two sequences are equal."""
    same = 0
    differ = min(len(left), len(right)) + 1
    # One comparison of slices is quicker than many of items.
    while differ - same > 1:
        middle = (same + differ) // 2
        if left[same:middle] == right[same:middle]:
            same = middle
        else:
            differ = middle
    return same

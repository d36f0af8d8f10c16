"""Fields of SGLang with one value for all prompts of a request, or a list with one for each."""

from __future__ import annotations

from typing import Any

from weft.server.errors import ApiError


def per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """The value for each of `count` prompts. Raises `ApiError` for a list of another length."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ApiError(
            400,
            f"{name} has the length {len(value):,}; {count:,} is expected, an entry for each "
            "prompt",
            param=name,
        )
    return value

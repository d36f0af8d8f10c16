"""Stop strings, found in the plainest way."""

from __future__ import annotations


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The specification: the stop string that ends first, of those the longest."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None

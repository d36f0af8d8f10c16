"""Where a prompt may be cut: between pages, and not inside what must be computed as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

# Where a part of a prompt begins, and the place behind its end, in tokens.
Span: TypeAlias = tuple[int, int]


def border_before(end: int, whole: Sequence[Span], page_size: int) -> int:
    """The last border of pages up to `end` that is inside none of the spans `whole`, which are in
    the order of the prompt."""
    border = end // page_size * page_size
    for first, last in reversed(whole):
        if first < border < last:
            border = first // page_size * page_size
    return border


def border_behind(begin: int, whole: Sequence[Span], page_size: int) -> int:
    """The first border of pages behind `begin` that is inside none of the spans."""
    border = (begin // page_size + 1) * page_size
    for first, last in whole:
        if first < border < last:
            border = -(-last // page_size) * page_size
    return border

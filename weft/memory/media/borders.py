"""Where a prompt may be cut: between pages, and not inside a span that is computed in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

# First token of a part of a prompt, and the end (exclusive).
Span: TypeAlias = tuple[int, int]


def border_before(end: int, unsplit: Sequence[Span], page_size: int) -> int:
    """The last page border up to `end` that is inside none of the spans `unsplit`, which are in the
    order of the prompt."""
    border = end // page_size * page_size
    for first, last in reversed(unsplit):
        if first < border < last:
            border = first // page_size * page_size
    return border


def border_after(begin: int, unsplit: Sequence[Span], page_size: int) -> int:
    """The first page border after `begin` that is inside none of the spans."""
    border = (begin // page_size + 1) * page_size
    for first, last in unsplit:
        if first < border < last:
            border = -(-last // page_size) * page_size
    return border

"""The knee of a curve of goodput: the highest level at which enough requests are within the bounds.
Above it, waiting times grow faster than the load."""

from __future__ import annotations

from collections.abc import Callable, Sequence

NO_LEVEL = -1


def find_knee(bears: Callable[[int], bool], num_levels: int, first: int = 0) -> int:
    """The highest index whose level is borne, if all below it are; NO_LEVEL if not even the lowest
    one is. The search begins at `first`: a good guess saves trials."""
    low = NO_LEVEL  # borne
    high = num_levels  # not borne, or not there
    stride = 1
    index = min(max(first, 0), num_levels - 1)
    if bears(index):
        low = index
    else:
        high = index
    is_up = low == index
    # Strides double until the knee is between two levels; then halves.
    while low + 1 < high and (high == num_levels if is_up else low == NO_LEVEL):
        index = min(low + stride, high - 1) if is_up else max(high - stride, 0)
        stride *= 2
        if bears(index):
            low = index
        else:
            high = index
    while low + 1 < high:
        middle = (low + high) // 2
        if bears(middle):
            low = middle
        else:
            high = middle
    return low


def around(levels: Sequence[float], index: int, num: int = 4) -> list[int]:
    """Indexes of levels for a curve: `num` in even distances up to the one at `index`, and some
    above it."""
    last = max(index, 0)
    below = {round(part * last / num) for part in range(1, num + 1)}
    above = {last + 1, last + 3}
    return sorted(one for one in {0, *below, *above} if one < len(levels))

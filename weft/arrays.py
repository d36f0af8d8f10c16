"""Types of arrays, and arithmetic on them that more than one room needs. It knows nothing of
requests or tensors."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int32]
LongArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]

Ints = TypeVar("Ints", IntArray, LongArray)

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # what splitmix64 steps by


def consecutive(starts: Ints, lens: IntArray | LongArray) -> Ints:
    """Ranges, one after the other: `starts[i]`, `starts[i] + 1`, ... with `lens[i]` numbers each.

    Returns [sum of lens], of the type of `starts`.

        starts 5 20, lens 3 2:    5 6 7 20 21
    """
    ends = np.cumsum(lens, dtype=starts.dtype)
    # Number i of the result is i plus what its range begins above or below its place in the result.
    offsets = np.repeat(starts - (ends - lens.astype(starts.dtype)), lens)
    numbers: Ints = offsets + np.arange(len(offsets), dtype=starts.dtype)
    return numbers


def or_zeros(numbers: IntArray | None, num: int) -> IntArray:
    """`numbers` [num]; None: all are 0."""
    return np.zeros(num, np.int32) if numbers is None else numbers


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A number that looks random for each of `x` [n], always the same one; overflow is wanted.

    Source: splitmix64, Steele et al. 2014.
    """
    x = x + GOLDEN_GAMMA
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

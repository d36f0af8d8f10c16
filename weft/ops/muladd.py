"""a b + c in float32 on the host, with the bits of a processor's instruction for it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

# Of the 53 bits of a float64, those that a float32 has no place for.
BEYOND = np.int64((1 << 29) - 1)
HALF = np.int64(1 << 28)


def fused_muladd(
    a: FloatArray,
    b: FloatArray | np.float32,
    c: FloatArray,
) -> FloatArray:
    """Rounded once, as fused instructions do; numbers below the smallest normal one excepted.

    The product of two float32 is exact in float64. Their sum with a third is rounded to float64,
    and then to float32: twice is another number than once only where the first rounding has led to
    the middle between two float32. These few are moved to the side from which they came.
    """
    product = a.astype(np.float64) * b
    addend = c.astype(np.float64)
    total = product + addend
    is_middle = (total.view(np.int64) & BEYOND) == HALF
    if is_middle.any():
        product = np.broadcast_to(product, total.shape)[is_middle]
        addend = addend[is_middle]
        rounded = total[is_middle]
        # What the first rounding has left out (Knuth's sum of two).
        share = rounded - product
        left = (product - (rounded - share)) + (addend - share)
        towards = np.where(left == 0, rounded, np.copysign(np.inf, left))
        total[is_middle] = np.nextafter(rounded, towards)
    return total.astype(np.float32)


def plain_muladd(
    a: FloatArray,
    b: FloatArray | np.float32,
    c: FloatArray,
) -> FloatArray:
    """Rounded behind the product and behind the sum."""
    product: FloatArray = a * b
    return product + c

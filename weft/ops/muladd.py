"""a b + c in float32 on the host, with the same bits as a processor's fused instruction."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

# The bits of a float64 that a float32 cannot hold: 29 of 53.
BEYOND = np.int64((1 << 29) - 1)
HALF = np.int64(1 << 28)


def fused_muladd(
    a: FloatArray,
    b: FloatArray | np.float32,
    c: FloatArray,
) -> FloatArray:
    """a b + c, rounded once, as fused instructions do; except for subnormal numbers.

    The product of two float32 is exact in float64. The sum is rounded to float64, and then to
    float32. Two roundings differ from one only if the first leads to the middle between two
    float32. These few sums are moved towards the exact value.
    """
    product = a.astype(np.float64) * b
    addend = c.astype(np.float64)
    total = product + addend
    is_middle = (total.view(np.int64) & BEYOND) == HALF
    if is_middle.any():
        product = np.broadcast_to(product, total.shape)[is_middle]
        addend = addend[is_middle]
        rounded = total[is_middle]
        # The error of the first rounding (Knuth's TwoSum).
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
    """a b + c, rounded after the product and after the sum."""
    product: FloatArray = a * b
    return product + c

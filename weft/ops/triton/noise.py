"""The noise of `ops/noise.py`, for use inside kernels: the same hash with the same bits, and Gumbel
noise computed from them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gumbel(token, key, other_key):
    """Standard Gumbel noise for token ids, int32 [n], under the two keys of a row (int32)."""
    x = token.to(tl.uint32) * 0x9E3779B9 + key.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x21F0AAAD + other_key.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 15)) * 0xD35A2D97
    x = (x ^ (x >> 15)) & 0x7FFFFFFF
    # 31 bits and a half. The largest values would round to 1, and make the noise infinite.
    u = tl.minimum((x.to(tl.float32) + 0.5) * 4.656612873077393e-10, 1.0 - 5.9604644775390625e-08)
    return -tl.log(-log1p(-u))


@triton.jit
def log1p(x):
    """log(1 + x) for -1 < x <= 0, without the rounding error of 1 + x. Source: Goldberg 1991,
    theorem 4."""
    z = 1.0 + x
    return tl.where(z == 1.0, x, tl.log(z) * (x / tl.where(z == 1.0, 1.0, z - 1.0)))

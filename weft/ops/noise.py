"""Noise as a pure function of (seed, position, token id): sampled tokens do not depend on the
batch, and are the same on every rank and device.

    seed, position --splitmix64--> 64-bit key of a row
    key, token id --two rounds of a 32-bit mix--> uniform --> Gumbel
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.arrays import splitmix64

MASK_32 = 0xFFFFFFFF
TINY = 2.0**-31  # the hash gives 31 bits


def row_keys(seeds: NDArray[np.int64], positions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Two 32-bit keys per (seed, position): [n], [n] -> [n, 2]. Source: splitmix64, Steele et al.
    2014."""
    with np.errstate(over="ignore"):
        x = splitmix64(splitmix64(seeds.astype(np.uint64)) ^ positions.astype(np.uint64))
    return (
        np.stack((x & np.uint64(MASK_32), x >> np.uint64(32)), axis=1)
        .astype(np.uint32)
        .view(np.int32)
    )


def gumbel(keys: Tensor, num_tokens: int) -> Tensor:
    """Standard Gumbel noise for token ids 0 to num_tokens - 1: keys int32 [n, 2] -> float32 [n,
    num_tokens].

    -log(E) with E = -log(1 - u), u in (0, 1): the large values, which decide the draw, come from
    small u, where float32 is dense.
    """
    ids = torch.arange(
        num_tokens,
        dtype=torch.int32,
        device=keys.device,
    )
    bits = _hash(ids, keys[:, :1], keys[:, 1:]).bitwise_and_(0x7FFFFFFF)
    # The middle of each of 2^31 intervals, so that u is neither 0 nor 1.
    u = bits.to(torch.float32)
    u.add_(0.5).mul_(TINY).clamp_(max=1.0 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def _hash(
    x: Tensor,
    key: Tensor,
    other_key: Tensor,
) -> Tensor:
    """32-bit mix of x with two keys, in wrapping int32. Multipliers: lowbias32,
    nullprogram.com/blog/2018/07/31."""
    x = torch.mul(x, _signed(0x9E3779B9)) + key
    x ^= _shifted(x, 16)
    x *= _signed(0x21F0AAAD)
    x += other_key
    x ^= _shifted(x, 15)
    x *= _signed(0xD35A2D97)
    x ^= _shifted(x, 15)
    return x


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits, filled with zeros instead of the sign."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _signed(value: int) -> int:
    """The value of a uint32's bits as an int32."""
    return value - (1 << 32) if value >> 31 else value

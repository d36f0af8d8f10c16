"""Seeds for requests that bring none."""

from __future__ import annotations


def seed_of(seed: int, number: int) -> int:
    """A seed for the request with this number: splitmix64, as a signed 64-bit integer."""
    mask = (1 << 64) - 1
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z

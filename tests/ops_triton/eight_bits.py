"""Floats of eight bits in Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor


def carried(got: Tensor, want: Tensor) -> Tensor:
    """What the interpreter rounds wrongly made right: where a value is rounded up to a power of two
    it forgets to carry, and gives half of it; and below 2^-6 it may be one step of 2^-9 off. A GPU
    does this by one instruction."""
    is_power = want.abs().frexp().mantissa == 0.5
    is_small = (want.abs() <= 2**-6) & ((got - want).abs() <= 2**-9)
    return torch.where(is_small | (is_power & (2 * got == want)), want, got)

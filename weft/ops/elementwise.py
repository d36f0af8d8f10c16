"""What stands between the matrix products of a transformer: normalisation, rotary embedding, gated
activation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32.

    x [..., H], weight [H] -> [..., H]. Source: arXiv:1910.07467.
    """
    return F.rms_norm(
        x,
        (x.shape[-1],),
        weight,
        eps,
    )


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up, of the two halves of the last dimension: [..., 2 I] -> [..., I]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rotary_angles(
    positions: Tensor,
    inv_freq: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles at `positions` [T], each float32 [T, D / 2].

    inv_freq [D / 2], radians per position; `scale` multiplies both (yarn).
    """
    angles = positions[:, None].float() * inv_freq
    return angles.cos().mul_(scale), angles.sin().mul_(scale)


def rotary_tables(
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """What `apply_rotary` needs: the cosine twice and the sine with both signs, each [T, 1, D].

    The first half of the sine is negative: that makes the rotation two products and a sum.
    """
    twice = torch.cat((cos, cos), -1)[:, None]
    signed = torch.cat((-sin, sin), -1)[:, None]
    return twice.to(dtype), signed.to(dtype)


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
) -> Tensor:
    """Rotate pairs (i, i + D / 2) of each head: x [T, heads, D] with `rotary_tables`.

    Source: arXiv:2104.09864, in the half-split order of Hugging Face checkpoints.
    """
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return torch.addcmul(x * cos, swapped, signed_sin)

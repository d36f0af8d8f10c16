"""Operations between the matrix products of a transformer: normalisation, rotary embedding,
activations."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

CLAMPED = "clamped_swiglu"  # also changes `up`, so only `gate_and_mul` has it, not GATES
CLAMP = 7.0
CLAMPED_ALPHA = 1.702
QUICK_GELU = 1.702


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32.

    x [..., H], weight [H] -> [..., H]. Source: arXiv:1910.07467.
    """
    if weight.dtype != x.dtype:  # an exact weight
        return rms_norm(x.float(), weight, eps).to(x.dtype)
    return F.rms_norm(
        x,
        (x.shape[-1],),
        weight,
        eps,
    )


def gate_and_mul(x: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, of the two halves of the last dimension: [..., 2 I] -> [..., I]."""
    gate, up = x.chunk(2, dim=-1)
    if activation == CLAMPED:
        return clamped_swiglu(gate, up)
    return GATES[activation](gate).mul_(up)


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """(up + 1) gate sigmoid(1.702 gate), with gate <= 7 and -7 <= up <= 7 by clamping.

    Source: gpt-oss, arXiv:2508.10925.
    """
    gate = gate.clamp(max=CLAMP)
    up = up.clamp(-CLAMP, CLAMP)
    return (up + 1) * gate * torch.sigmoid(CLAMPED_ALPHA * gate)


def gelu(x: Tensor) -> Tensor:
    """x Φ(x), exactly. Source: arXiv:1606.08415."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """gelu approximated by tanh, as some models were trained with it."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x), an approximation of gelu that CLIP was trained with."""
    return x * torch.sigmoid(QUICK_GELU * x)


def relu2(x: Tensor) -> Tensor:
    """Source: arXiv:2109.08668."""
    return torch.relu(x).square()


ACTIVATIONS = {
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": torch.relu,
    "relu2": relu2,
    "tanh": torch.tanh,
}
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": gelu_tanh,
}


def scaled_logits(logits: Tensor, scale: float, cap: float) -> Tensor:
    """cap tanh(scale logits / cap); cap 0: scale logits. In place."""
    if cap:
        return logits.mul_(scale / cap).tanh_().mul_(cap)
    if scale != 1:
        logits.mul_(scale)
    return logits


def rotary_angles(
    positions: Tensor,
    inv_freq: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles at `positions`, each float32 [T, D / 2]. Positions are [T], or
    [T, D / 2] with one position per pair.

    inv_freq [D / 2], radians per position; `scale` multiplies both (yarn).
    """
    if positions.ndim == 1:
        positions = positions[:, None]
    angles = positions.float() * inv_freq
    return angles.cos().mul_(scale), angles.sin().mul_(scale)


def rotary_tables(
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The arguments of `apply_rotary`: the cosine twice and the sine with both signs, each
    [T, 1, D].

    The first half of the sine is negative, so that a rotation is two products and a sum.
    """
    twice = torch.cat((cos, cos), -1)[:, None]
    signed = torch.cat((-sin, sin), -1)[:, None]
    return twice.to(dtype), signed.to(dtype)


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
) -> Tensor:
    """Rotate pairs (i, i + D / 2) of each head: x [T, heads, D] with `rotary_tables`. If heads have
    more than D values, only the first D are rotated.

    Source: arXiv:2104.09864, in the half-split order of Hugging Face checkpoints.
    """
    size = cos.shape[-1]
    if size < x.shape[-1]:
        turned = apply_rotary(x[..., :size], cos, signed_sin)
        return torch.cat((turned, x[..., size:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return torch.addcmul(x * cos, swapped, signed_sin)


def in_halves(x: Tensor, size: int) -> Tensor:
    """Reorder consecutive pairs to pairs (i, i + size / 2), in the first `size` values of each
    head: x [T, heads, D]. `apply_rotary` rotates pairs of this order. If queries and keys are both
    reordered, their products do not change."""
    first = x[..., 0:size:2]
    second = x[..., 1:size:2]
    return torch.cat((first, second, x[..., size:]), dim=-1)

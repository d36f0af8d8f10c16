"""Rotary position embedding and the ways to stretch it beyond the length a model was trained
for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weft.config.model import ModelConfig, RopeConfig
from weft.ops.elementwise import rotary_angles


class Rope:
    """The angles that rotate queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        self._inv_freq = inverse_frequencies(config.rope, config.head_dim)  # [head_dim / 2]
        self._scale = config.rope.attention_factor

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos and sin, float32 [T, head_dim / 2]"""
        self._inv_freq = self._inv_freq.to(positions.device)
        return rotary_angles(positions, self._inv_freq, self._scale)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position for each pair of a head, float32 [head_dim / 2]."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.scaling:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "factors":
            return plain / torch.tensor(rope.factors)
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain)
    raise AssertionError(f"rope scaling {rope.scaling!r}")


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Long waves are stretched, short ones kept, those between mixed. Source: the Llama 3.1
    reference code."""
    waves = rope.original_max_position * plain / (2 * math.pi)  # in the length trained for
    kept = (waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(plain / rope.factor, plain, kept.clamp(0, 1))


def _yarn(rope: RopeConfig, plain: Tensor) -> Tensor:
    """As llama3, with a ramp over the index of the pair instead of the wavelength. Source:
    arXiv:2309.00071, 3.2."""
    head_dim = 2 * len(plain)

    def pair_with(waves: float) -> float:
        """Twice the index of the pair that turns so often in the length trained for."""
        return (
            head_dim
            * math.log(rope.original_max_position / (waves * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low = max(math.floor(pair_with(rope.beta_fast)), 0)
    high = min(math.ceil(pair_with(rope.beta_slow)), head_dim - 1)
    stretched = (torch.arange(len(plain)) - low) / max(high - low, 0.001)
    return torch.lerp(plain, plain / rope.factor, stretched.clamp(0, 1))

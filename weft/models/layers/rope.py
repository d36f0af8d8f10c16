"""Rotary position embedding, and the methods to extend it beyond the trained length."""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import torch
from torch import Tensor

from weft.config.decoder import RopeConfig
from weft.config.model import ModelConfig
from weft.ops.elementwise import apply_rotary, in_halves, rotary_angles, rotary_tables


class RotaryTables(NamedTuple):
    """The rotation of the tokens of a step."""

    cos: Tensor  # [T, 1, rotary_dim]
    signed_sin: Tensor  # like cos
    q_scale: Tensor | None  # [T]


class Rope:
    """The angles that rotate queries and keys."""

    def __init__(self, rope: RopeConfig, config: ModelConfig, head_dim: int = 0) -> None:
        """`head_dim`: the size of a head, if not that of the model."""
        # longrope has other factors for short contexts, so the served length decides.
        context_length = config.context_length or config.max_position
        # [rotary_dim / 2]
        size = head_dim or config.head_dim
        self._inv_freq = inverse_frequencies(rope, size, context_length)
        self._scale = rope.attention_factor
        self._query_growth = rope.query_growth
        self._growth_offset = rope.growth_offset
        self._original_max_position = rope.original_max_position
        self.rotary_dim = 2 * len(self._inv_freq)  # the first values of each head are rotated
        self.side_by_side = rope.side_by_side
        self._other: Rope | None = None  # the same with other pairs
        # [rotary_dim / 2] the position axis of each pair (M-RoPE); None: a token has one position.
        self.axes: Tensor | None = None
        if rope.axes:
            self.axes = torch.tensor(rope.axes)
            assert len(self.axes) == len(self._inv_freq), "an axis for each pair"

    def with_pairs(self, *, side_by_side: bool) -> Rope:
        """The same angles for heads whose pairs stand so; one and the same each time, because a
        backend has one table for each rotation."""
        if side_by_side == self.side_by_side:
            return self
        if self._other is None:
            self._other = copy.copy(self)
            self._other.side_by_side = side_by_side
        return self._other

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T], or [3, T] in time, height and width -> cos and sin, float32
        [T, rotary_dim / 2]"""
        if positions.ndim == 2:
            assert self.axes is not None, "tokens have one position in this model"
            self.axes = self.axes.to(positions.device)
            positions = positions[self.axes].T
        # Made on the CPU, because the device is not known until the first step; moved once.
        self._inv_freq = self._inv_freq.to(positions.device)
        return rotary_angles(positions, self._inv_freq, self._scale)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> RotaryTables:
        """The tables for `rotate` of tokens at these positions (shapes: `at`)."""
        cos, signed_sin = rotary_tables(*self.at(positions), dtype)
        return RotaryTables(cos, signed_sin, self.query_scale(positions))

    def rotate(self, q: Tensor, k: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor]:
        """q and k [T, heads, D], rotated, in torch. Pairs that were side by side become halves."""
        # The order of values within a head changes no score, as long as q and k share it.
        if self.side_by_side:
            q = in_halves(q, self.rotary_dim)
            k = in_halves(k, self.rotary_dim)
        q = apply_rotary(q, tables.cos, tables.signed_sin)
        k = apply_rotary(k, tables.cos, tables.signed_sin)
        if tables.q_scale is not None:
            q = q * tables.q_scale[:, None, None].to(q.dtype)
        return q, k

    def query_scale(self, positions: Tensor) -> Tensor | None:
        """The factor of queries at these positions, float32 [T]; None: no factor."""
        if not self._query_growth:
            return None
        counted = positions.float() + self._growth_offset
        lengths = torch.floor(counted / self._original_max_position)
        return 1 + self._query_growth * torch.log1p(lengths)


def inverse_frequencies(rope: RopeConfig, head_dim: int, context_length: int = 0) -> Tensor:
    """Radians per position for each pair of a head, float32 [rotary_dim / 2], for contexts of up to
    `context_length` tokens."""
    if rope.scaling == "proportional":
        return _proportional(rope, head_dim)
    if rope.scaling == "none":
        return torch.zeros(0)
    size = rope.dims or int(head_dim * rope.share)
    plain = 1.0 / rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
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
        case "longrope":
            # One choice for all tokens: a change would make the cached keys wrong.
            is_long = context_length > rope.original_max_position
            return plain / torch.tensor(rope.factors if is_long else rope.short_factors)
    raise AssertionError(f"rope scaling {rope.scaling!r}")


def _proportional(rope: RopeConfig, head_dim: int) -> Tensor:
    """The first pairs have the frequencies of a head that is rotated as a whole; all others do not
    turn. A head's pairs are (i, i + half of the head), whatever part of them turns."""
    num_turned = int(rope.share * head_dim // 2)
    exponents = torch.arange(0, 2 * num_turned, 2, dtype=torch.float32) / head_dim
    found = torch.zeros(head_dim // 2)
    found[:num_turned] = 1.0 / rope.theta**exponents / rope.factor
    return found


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Low frequencies are divided by the factor, high ones kept, those between interpolated.
    Source: the Llama 3.1 reference code."""
    # A pair with many turns within the trained length separates near tokens and must not be
    # stretched; one with less than one turn would meet angles that training never had.
    waves = rope.original_max_position * plain / (2 * math.pi)  # turns in the trained length
    kept = (waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(plain / rope.factor, plain, kept.clamp(0, 1))


def _yarn(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Like llama3, with a ramp over the index of the pair instead of the wavelength. Source:
    arXiv:2309.00071, 3.2."""
    head_dim = 2 * len(plain)

    def pair_with(waves: float) -> float:
        """Twice the index of the pair that makes `waves` turns in the trained length."""
        return (
            head_dim
            * math.log(rope.original_max_position / (waves * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low = pair_with(rope.beta_fast)
    high = pair_with(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    stretched = (torch.arange(len(plain)) - low) / max(high - low, 0.001)
    return torch.lerp(plain, plain / rope.factor, stretched.clamp(0, 1))

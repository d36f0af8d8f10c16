"""Reads the rotary embedding in a `config.json`: `rope_parameters` (transformers 5), or
`rope_theta` and `rope_scaling`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.config.config_json import THETA, get, number, rope_theta, section, size
from weft.config.decoder import RopeConfig
from weft.config.families.family import Config, head_dim_of
from weft.config.model_errors import UnsupportedModel
from weft.config.numbers import shown
from weft.json_types import JsonMapping, JsonObject

ROPE_SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn")
NUM_AXES = 3  # positions of a token of pictures and videos: time, height, width


def read_rope(
    config: Config,
    *,
    theta: float = THETA,
    is_partial: bool = False,
    side_by_side: bool = False,
) -> RopeConfig:
    """The rotation that all layers of a model share. `theta`: default base of a file without one;
    `is_partial`: the family supports "partial_rotary_factor"."""
    values = rope_values(config)
    return rope_of(
        config,
        values,
        theta=rope_theta(config, theta),
        is_partial=is_partial,
        side_by_side=side_by_side,
    )


def rope_values(config: Config) -> JsonObject:
    """What `rope_scaling` and `rope_parameters` say together."""
    return {**section(config, "rope_scaling"), **section(config, "rope_parameters")}


def axes_of_sections(sections: Sequence[int]) -> tuple[int, ...]:
    """The position that rotates each pair: `sections[0]` consecutive pairs by time, then
    `sections[1]` by height, `sections[2]` by width, and so on from time again."""
    found: list[int] = []
    for index, num_pairs in enumerate(sections):
        found += [index % NUM_AXES] * num_pairs
    return tuple(found)


def interleaved_axes(sections: Sequence[int], num_pairs: int) -> tuple[int, ...]:
    """The position that rotates each pair, if time, height and width alternate until `sections`
    pairs rotate by height and by width. All others rotate by time."""
    found = []
    for pair in range(num_pairs):
        axis = pair % NUM_AXES
        is_one = pair < NUM_AXES * sections[axis]
        found.append(axis if is_one else 0)
    return tuple(found)


def rope_by_type(config: Config, kind: str, theta: float) -> RopeConfig:
    """The rotation of one kind of layers: `rope_parameters` may have a part for each kind."""
    parameters = section(config, "rope_parameters")
    return rope_of(config, section(parameters, kind), theta=theta)


def proportional(values: JsonMapping, *, theta: float, share: float) -> RopeConfig:
    """A rotation in which the first pairs of a head turn as if all did, and the others not at all.
    `theta`, `share`: its base and the part of the pairs that turn, if `values` has none."""
    found = get(values, "partial_rotary_factor", float, share)
    if not 0 < found <= 1:
        raise UnsupportedModel(
            f"partial_rotary_factor is {found:g}; it must be more than 0 and at most 1"
        )
    return RopeConfig(
        theta=rope_theta(values, theta),
        scaling="proportional",
        factor=number(values, "factor", 1.0, above=0.0),
        share=found,
    )


def rope_of(
    config: Config,
    values: JsonMapping,
    *,
    theta: float,
    is_partial: bool = False,
    side_by_side: bool = False,
) -> RopeConfig:
    """The rotation in `values`. `theta`: its base if `values` has none. Raises UnsupportedModel."""
    max_position = size(config, "max_position_embeddings")
    theta = rope_theta(values, theta)
    kind = get(values, "rope_type", str, get(values, "type", str, "default"))
    if kind == "factors":  # only in weft's own config.json (`config/gguf.py`)
        return RopeConfig(
            theta=theta,
            scaling=kind,
            factors=tuple(values["factors"]),
            side_by_side=side_by_side,
        )
    if kind not in ROPE_SCALINGS:
        raise UnsupportedModel(
            f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_SCALINGS)}"
        )
    share = rotated_share(config, values)
    if share != 1.0 and not is_partial:
        raise UnsupportedModel(
            "partial_rotary_factor is not 1; partly rotated heads are not supported"
        )
    if kind in (
        "default",
        "dynamic",
    ):  # dynamic changes nothing up to max_position, which no request exceeds
        return RopeConfig(theta=theta, share=share, side_by_side=side_by_side)
    factor = number(values, "factor", above=0.0)
    original = size(values, "original_max_position_embeddings", max_position)
    original = size(config, "original_max_position_embeddings", original)
    if kind == "llama3":
        low = number(values, "low_freq_factor", above=0.0)
        return RopeConfig(
            theta=theta,
            scaling=kind,
            factor=factor,
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=number(values, "high_freq_factor", above=low),
            share=share,
            side_by_side=side_by_side,
        )
    if kind == "yarn":
        return RopeConfig(
            theta=theta,
            scaling=kind,
            factor=factor,
            original_max_position=original,
            attention_factor=_yarn_attention_factor(values, factor),
            beta_fast=number(values, "beta_fast", 32.0, above=0.0),
            beta_slow=number(values, "beta_slow", 1.0, above=0.0),
            truncate=get(values, "truncate", bool, True),
            share=share,
            side_by_side=side_by_side,
        )
    return RopeConfig(
        theta=theta,
        scaling=kind,
        factor=factor,
        share=share,
        side_by_side=side_by_side,
    )


def rotated_share(config: Config, values: JsonMapping) -> float:
    share = get(config, "partial_rotary_factor", float, 1.0)
    share = get(values, "partial_rotary_factor", float, share)
    if not 0 < share <= 1:
        raise UnsupportedModel(
            f"partial_rotary_factor is {share:g}; it must be more than 0 and at most 1"
        )
    return share


def longrope(config: Config, values: JsonMapping) -> RopeConfig:
    """Frequencies found by a search: one set for short contexts and one for long ones.
    Source: arXiv:2402.13753."""
    max_position = size(config, "max_position_embeddings")
    original = size(values, "original_max_position_embeddings", max_position)
    original = size(config, "original_max_position_embeddings", original)
    factor = number(values, "factor", max_position / original, above=0.0)
    attention_factor = 1.0
    if factor > 1 and original > 1:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    share = rotated_share(config, values)
    return RopeConfig(
        theta=rope_theta(values, rope_theta(config, THETA)),
        scaling="longrope",
        factor=factor,
        original_max_position=original,
        attention_factor=number(values, "attention_factor", attention_factor, above=0.0),
        factors=_factors(config, values, "long_factor", share),
        short_factors=_factors(config, values, "short_factor", share),
        share=share,
    )


def _factors(
    config: Config,
    values: JsonMapping,
    key: str,
    share: float,
) -> tuple[float, ...]:
    head_dim = head_dim_of(config)
    num_pairs = int(head_dim * share) // 2
    factors = get(values, key, list)
    is_right = all(type(one) in (int, float) and 0 < one < 1e30 for one in factors)
    if len(factors) != num_pairs or not is_right:
        raise UnsupportedModel(
            f"{key} is {shown(factors)}; it must hold {num_pairs} numbers above 0, one for each "
            "pair of a head"
        )
    return tuple(map(float, factors))


def _yarn_attention_factor(values: JsonMapping, factor: float) -> float:
    """Source: YaRN, arXiv:2309.00071, section 3.4; `mscale` is DeepSeek's refinement of it."""

    def temperature(scale: float) -> float:
        if factor > 1:
            return 0.1 * scale * math.log(factor) + 1.0
        return 1.0

    mscale = number(values, "mscale", 0.0, low=0.0)
    mscale_all = number(values, "mscale_all_dim", 0.0, low=0.0)
    default = temperature(1.0)
    if mscale and mscale_all:
        default = temperature(mscale) / temperature(mscale_all)
    return number(values, "attention_factor", default, above=0.0)

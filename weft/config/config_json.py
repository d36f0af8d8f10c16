"""Reads values of a `config.json` one by one. Each has a type and a range; null counts as missing.
Knows no model."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from weft.config.model_errors import BadConfig, UnsupportedModel
from weft.config.numbers import shown
from weft.json_types import JsonMapping, JsonObject

T = TypeVar("T")
MAX_COUNT = 1_024
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 1_024
THETA = 10_000.0  # usual base of a rotation


def get(config: JsonMapping, key: str, kind: type[T], default: T | None = None) -> T:
    """The value of a key; the default if it is null or missing. Without a default the key is
    required. Raises UnsupportedModel."""
    value = config.get(key)
    if value is None:
        if default is None:
            raise UnsupportedModel(f"config.json has no {key!r}")
        return default
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 2**1_000 else math.inf
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UnsupportedModel(
            f"{key} is {shown(value)}; config.json must give it as {kind.__name__}"
        )
    return value


def said(config: JsonMapping) -> JsonObject:
    """The values of a `config.json`, or of an object in it, without those that are null."""
    return {key: value for key, value in config.items() if value is not None}


def section(config: JsonMapping, key: str) -> JsonObject:
    """What the object of a key says; empty if it is null or missing. Raises UnsupportedModel."""
    return said(get(config, key, dict, {}))


def size(config: JsonMapping, key: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
    """An integer from 1 to `most`. Raises BadConfig for others."""
    value = get(config, key, int, default)
    if value < 1:
        raise BadConfig(f"{key} is {shown(value)}; it must be at least 1")
    if value > most:
        raise BadConfig(f"{key} is {shown(value)}; it must be at most {most:,}")
    return value


def count(config: JsonMapping, key: str, default: int = 0, *, most: int = MAX_COUNT) -> int:
    """The number of something that a model may have none of. Raises BadConfig for one below 0 or
    above `most`."""
    value = get(config, key, int, default)
    if not 0 <= value <= most:
        raise BadConfig(f"{key} is {shown(value)}; 0 to {most:,} are expected")
    return value


def number(
    config: JsonMapping,
    key: str,
    default: float | None = None,
    *,
    low: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
) -> float:
    """A finite number that is at least `low`, greater than `above`, and at most `most`."""
    value = get(config, key, float, default)
    if not (math.isfinite(value) and low <= value <= most and value > above):
        allowed = f"greater than {above:g}" if math.isfinite(above) else f"at least {low:g}"
        if math.isfinite(most):
            allowed += f" and at most {most:g}"
        raise BadConfig(f"{key} is {value:g}; it must be a number {allowed}")
    return value


def rope_theta(config: JsonMapping, default: float = THETA, *, key: str = "rope_theta") -> float:
    """The base of a rotation."""
    return number(config, key, default, above=1.0)


def token_ids(config: JsonMapping, key: str) -> tuple[int, ...]:
    """The ids of a key that has none, one or several."""
    value = config.get(key)
    if value is None:
        ids = []
    elif isinstance(value, list):
        ids = value
    else:
        ids = [value]
    if not all(type(token) is int for token in ids):
        raise UnsupportedModel(f"{key} is {shown(value)}; a token id or a list of them is expected")
    return tuple(ids)


def require(config: JsonMapping, key: str, *allowed: Any) -> None:
    """Raise UnsupportedModel for a value that would change the computation; null and absence are
    allowed."""
    value = config.get(key)
    if value is not None and value not in allowed:
        names = " or ".join(map(repr, allowed))
        raise UnsupportedModel(f"{key} is {str(value)[:64]}; only {names} is supported")

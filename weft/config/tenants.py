"""Weights of tenants, as users write them: `alice=2,bob=0.5`."""

from __future__ import annotations

import math

from weft.config.options import SettingsError


def parse_weights(text: str, source: str) -> tuple[tuple[str, float], ...]:
    """Pairs of tenant and weight, in order. Raises SettingsError; `source` is the setting's name in it."""
    weights: dict[str, float] = {}
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        name, equals, number = entry.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not equals or not name.strip() or not 0 < weight < math.inf:
            raise SettingsError(
                f"{source}: {entry!r} is not understood; NAME=WEIGHT with a weight above 0 is expected"
            )
        weights[name.strip()] = weight
    return tuple(weights.items())

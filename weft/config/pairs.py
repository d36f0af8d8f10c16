"""Reads options that map names to numbers, as users write them: `alice=2,bob=0.5`. Knows nothing of
the meaning of the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

from weft.config.options import SettingsError


def parse_tenant_weights(text: str, source: str) -> tuple[tuple[str, float], ...]:
    """Tenants and their weights, in order. Raises SettingsError, which names the option
    `source`."""
    weights: dict[str, float] = {}
    for entry in _entries(text):
        # A tenant's name may contain "=", its weight may not.
        name, equals, number = entry.rpartition("=")
        weight = _number(number)
        if not equals or not name.strip() or not 0 < weight < math.inf:
            expected = "NAME=WEIGHT with a weight above 0 is expected"
            raise SettingsError(f"{source}: {entry!r} is not understood; {expected}")
        weights[name.strip()] = weight
    return tuple(weights.items())


def parse_tenant_parts(text: str, source: str) -> tuple[tuple[str, float], ...]:
    """Tenants and the share that each may have, in order. Raises SettingsError, which names the
    option `source`."""
    parts: dict[str, float] = {}
    for entry in _entries(text):
        name, equals, number = entry.rpartition("=")
        part = _number(number)
        if not equals or not name.strip() or not 0 <= part <= 1:
            expected = "NAME=PART with a part from 0 to 1 is expected"
            raise SettingsError(f"{source}: {entry!r} is not understood; {expected}")
        parts[name.strip()] = part
    return tuple(parts.items())


@cache
def parse_tenant_ttft(text: str, source: str = "--tenant-ttft-ms") -> tuple[tuple[str, int], ...]:
    """Tenants and the milliseconds to their first tokens, in order. Raises SettingsError."""
    fault = why_no_ttft(text)
    if fault:
        raise SettingsError(f"{source} is {text!r}; {fault}")
    found: dict[str, int] = {}
    for entry in _entries(text):
        name, _, number = entry.rpartition("=")
        found[name.strip()] = int(number)
    return tuple(found.items())


def why_no_ttft(text: str) -> str:
    """The fault of a text with tenants and times; "" if it has none."""
    expected = "NAME=MILLISECONDS with a whole number above 0 is expected"
    for entry in _entries(text):
        name, _, number = entry.rpartition("=")
        is_time = number.strip().isdecimal() and int(number) > 0
        if name.strip() and is_time:
            continue
        if entry == text:
            return expected
        return f"{entry!r} is not understood; {expected}"
    return ""


def _entries(text: str) -> Iterator[str]:
    """The entries of a comma-separated list, without empty ones."""
    for entry in text.split(","):
        if entry.strip():
            yield entry.strip()


def _number(text: str) -> float:
    """The number in `text`; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan

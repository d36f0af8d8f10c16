"""Reads the values of options for Ray, which come as text from the command line of `serve run`.

It imports nothing of Ray.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from weft.config.options import SettingsError


def number_of(args: Mapping[str, str], name: str, default: float) -> float:
    """An option that is a number. Raises SettingsError."""
    try:
        number = float(args.get(name, default))
    except ValueError as exc:
        raise SettingsError(f"{name} is {args[name]!r}; it is a number") from exc
    if not 0 <= number < math.inf:  # false for NaN, too
        raise SettingsError(f"{name} is {args[name]}; it is 0 or more")
    return number


def integer_of(args: Mapping[str, str], name: str, default: int, *, least: int = 1) -> int:
    """An option that counts something. Raises SettingsError."""
    number = number_of(args, name, default)
    if number < least or not number.is_integer():
        raise SettingsError(f"{name} is {args[name]}; it is a whole number, {least} or more")
    return int(number)


def is_on(args: Mapping[str, str], name: str) -> bool:
    """An option that is true or false, by default false. Raises SettingsError."""
    text = str(args.get(name, "false")).lower()
    if text not in ("true", "false"):
        raise SettingsError(f"{name} is {args[name]!r}; it is true or false")
    return text == "true"

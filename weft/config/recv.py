"""What steps count when messages are looked for only every few of them, as users write it: `decode=1,extend=1000`."""

from __future__ import annotations

from collections.abc import Sequence

from weft.config.options import SettingsError


def parse_recv_weights(text: str, modes: Sequence[str], source: str) -> dict[str, int]:
    """Weight by mode. Raises SettingsError, which names the modes there are; `source` is the setting's name in it."""
    weights: dict[str, int] = {}
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        name, _, number = entry.partition("=")
        if (
            name.strip() not in modes
            or not number.strip().isdecimal()
            or not 0 < int(number) < 2**31
        ):
            expected = (
                f"MODE=NUMBER with a number above 0 is expected, and one of {', '.join(modes)}"
            )
            raise SettingsError(f"{source}: {entry!r} is not understood; {expected}")
        weights[name.strip()] = int(number)
    return weights

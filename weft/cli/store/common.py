"""What the verbs of the store share. Only the folder of the models comes from the environment: a
model to remove must not."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from weft.config.options import Command, Settings, SettingsError, asked_help
from weft.weights.own import VARIABLE
from weft.weights.pull.progress import duration

DAY_S = 86_400


def settings_of(command: Command, argv: Sequence[str]) -> Settings | None:
    """The settings of a verb; None: its help was printed."""
    section = asked_help(argv)
    if section is not None:
        print(command.help(section))
        return None
    return command.read(argv, _environment())


def _environment() -> Mapping[str, str]:
    named = os.environ.get(VARIABLE)
    return {} if named is None else {VARIABLE: named}


def require_name(name: str, verb: str) -> str:
    if not name:
        raise SettingsError(f"no model is named: weft {verb} MODEL")
    return name


def ago(then: float) -> str:
    """How long ago a moment was: 3 days, 2 h 05 min."""
    seconds = max(time.time() - then, 0.0)
    if seconds < DAY_S:
        return f"{duration(seconds)} ago"
    days = int(seconds // DAY_S)
    return "1 day ago" if days == 1 else f"{days:,} days ago"

"""Every module of this package is a kind of pass around the computation of a model.

A module sets `PASS` to a function that takes what passes are made of (`PassParts`) and returns the
pass, or None if this runner does without. There is no other list of these passes: a new kind is a
new file. Passes that are tied to one device, or to a way to share a model, are made in the
`build.py` of it; those for a draft model stand outside of all.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import NamedTuple

from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig
from weft.executor.inputs import DeviceRowTable
from weft.executor.runner import Pass


class PassParts(NamedTuple):
    """The runner that the passes are for."""

    engine: EngineConfig
    model: ModelConfig
    # The rows of a model that generates on a CPU; None on other devices, and without KV.
    host_rows: DeviceRowTable | None = None


@functools.cache
def names() -> tuple[str, ...]:
    """The names of all kinds, sorted: the first is the outermost pass."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def make_passes(parts: PassParts) -> list[Pass]:
    """The passes of a runner, the outermost first."""
    found = []
    for name in names():
        made = importlib.import_module(f"{__name__}.{name}").PASS(parts)
        if made is not None:
            found.append(made)
    return found

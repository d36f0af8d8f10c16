"""The numbers of the rules, and the actions that follow from them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Rules(NamedTuple):
    budget_bytes: int  # of all models together
    max_models: int = 0  # in memory at a time; 0: as many as fit
    patience_s: float = 5.0  # wait after which a model in use must make room
    stay_loads: float = 4.0  # time that a model may stay, in times of its load
    least_stay_s: float = 5.0
    return_s: float = 60.0  # a model that comes back within this time keeps its stay while idle
    first_rate: float = 5e8  # bytes of weights that load in a second, before one is measured


class Load(NamedTuple):
    """Load a model that is not in memory. Its bytes count from now on."""

    name: str


class Grow(NamedTuple):
    """Give a loaded model its KV back."""

    name: str


class Shrink(NamedTuple):
    """Take the KV of an idle model; its weights stay."""

    name: str


class Unload(NamedTuple):
    name: str
    why: str  # "idle", "room" or "asked"


class Refuse(NamedTuple):
    """A model cannot be loaded; its waiting requests end with this reason."""

    name: str
    reason: str


Action: TypeAlias = Load | Grow | Shrink | Unload | Refuse


class Delay(NamedTuple):
    """What a request that waits for a model is told."""

    position: int  # models that are loaded before it
    eta_s: float  # until the model is ready, as far as known

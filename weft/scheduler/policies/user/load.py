"""Finds a policy that is not part of weft: `module:Class`, or a name that an installed package
registers in the entry point group `weft.policies`.

It searches the installed packages only for names that weft does not know.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from weft.config.plugins import COLON, PluginError, load_object
from weft.scheduler.policies.protocol import Policy

__all__ = ["COLON", "GROUP", "NoOwnPolicy", "entry_names", "load_own"]
GROUP = "weft.policies"


class NoOwnPolicy(ValueError):
    """A user's own policy cannot be loaded; the message says why."""


def entry_names() -> tuple[str, ...]:
    """The names of policies in installed packages, sorted."""
    return tuple(sorted(entry_points(group=GROUP).names))


def load_own(name: str) -> type[Policy]:
    """The class of a policy, by `module:Class` or by the name of an entry point.

    Raises NoOwnPolicy.
    """
    try:
        kind = load_object(name, GROUP)
    except PluginError as exc:
        raise NoOwnPolicy(str(exc)) from exc
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise NoOwnPolicy("it is not a subclass of weft.scheduler.policies.protocol.Policy")
    return kind

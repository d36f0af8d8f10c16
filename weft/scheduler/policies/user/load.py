"""Finds a policy that is not part of weft: `module:Class`, or a name that an installed package
registers in the entry point group `weft.policies`.

It searches the installed packages only for names that weft does not know.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from weft.scheduler.policies.protocol import Policy

GROUP = "weft.policies"
COLON = ":"


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
        kind = _of_module(name) if COLON in name else _of_package(name)
    except NoOwnPolicy:
        raise
    except Exception as exc:
        why = f"{type(exc).__name__}: {exc}"
        raise NoOwnPolicy(f"it could not be loaded: {why}") from exc
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise NoOwnPolicy("it is not a subclass of weft.scheduler.policies.protocol.Policy")
    return kind


def _of_module(name: str) -> object:
    module_name, _, class_name = name.partition(COLON)
    try:
        module = importlib.import_module(module_name.strip())
    except ModuleNotFoundError as exc:
        if exc.name and module_name.strip().startswith(exc.name):
            raise NoOwnPolicy(
                f"it could not be loaded: there is no module {exc.name!r} where Python looks for "
                "modules; PYTHONPATH=FOLDER adds the folder of its file (PYTHONPATH=. for this one)"
            ) from exc
        raise
    kind = getattr(module, class_name.strip(), None)
    if kind is None:
        raise NoOwnPolicy(f"{module_name} has no {class_name!r}")
    return kind


def _of_package(name: str) -> object:
    for point in entry_points(group=GROUP, name=name):
        return point.load()
    raise NoOwnPolicy(f"no installed package has this policy ({GROUP})")

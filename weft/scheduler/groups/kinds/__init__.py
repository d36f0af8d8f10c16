"""Every module of this package is a kind of layers with memory of their own.

A module sets `GROUP` to a function that takes what groups share (`GroupParts`) and returns the
model's group of this kind, or None if the model has no such layers. There is no other list of
groups: a new kind is a new file. A model whose layers all share one pool has no group.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from numbers import Integral
from typing import TYPE_CHECKING

from weft.config.plugins import load_object, refused

if TYPE_CHECKING:
    from weft.scheduler.groups.protocol import GroupParts, KvGroup


@functools.cache
def names() -> tuple[str, ...]:
    """The names of all kinds, sorted. `KvMemory` calls the groups in this order."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def make_groups(parts: GroupParts) -> list[KvGroup]:
    """The groups of a model: those of weft, then those of `--plugins`, in their order. Raises
    SettingsError for one of these that cannot be made."""
    groups = []
    for name in names():
        group = importlib.import_module(f"{__name__}.{name}").GROUP(parts)
        if group is not None:
            groups.append(group)
    for name in parts.settings.kv_groups:
        group = _from_outside(name, parts)
        if group is not None:
            groups.append(group)
    return groups


def _from_outside(name: str, parts: GroupParts) -> KvGroup | None:
    from weft.scheduler.groups.protocol import KvGroup

    wrong = ""
    try:
        make = load_object(name, "weft.kv_groups")
        group = make(parts) if callable(make) else make
        if isinstance(group, KvGroup):
            wrong = _wrong_numbers(group)
    except (Exception, SystemExit) as exc:  # whatever it raises: it is the code of others
        raise refused("kv_groups", name, f"cannot be made: {exc}") from exc
    if group is not None and not isinstance(group, KvGroup):
        raise refused("kv_groups", name, "makes no weft.scheduler.groups.protocol.KvGroup")
    if wrong:
        raise refused("kv_groups", name, wrong)
    return group


def _wrong_numbers(group: KvGroup) -> str:
    """Which of a group's numbers is none; "" if all are."""
    available = group.available
    numbers = {
        "available": 0 if available is None else available,
        "num_pages": group.num_pages,
        "longest": group.longest(1_000_000),
        "imbalance": group.ledger.imbalance,
        **group.ledger.usage(),
    }
    for what, number in numbers.items():
        if not isinstance(number, Integral):
            return f"{what} is {number!r:.40}; an integer is expected"
    return ""

"""Every module of `kinds/` is a scheduling policy: `dfs_weight.py` is the policy "dfs-weight".

A module sets `POLICY` to its class, a `Policy` (see `protocol.py`). There is no other list of
policies: the option `--schedule-policy`, the requests that switch the policy, `weft sim` and their
error messages take the names from here. The names are those of the files, and no module is imported
before its policy is used, so that the help of the command line stays fast. Other names may be those
of a user's own policies (`user/`).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import TYPE_CHECKING

from weft.config.options import did_you_mean
from weft.scheduler.policies import kinds

if TYPE_CHECKING:
    from weft.scheduler.policies.protocol import Policy, PolicyContext


class UnknownPolicy(ValueError):
    """A text stands for no policy. `fault` says why, without the text, and what is allowed."""

    def __init__(self, text: str, fault: str) -> None:
        super().__init__(f"{text!r}: {fault}")
        self.fault = fault


@functools.cache
def names() -> tuple[str, ...]:
    """The names of all policies, sorted."""
    modules = [module.name for module in pkgutil.iter_modules(kinds.__path__)]
    return tuple(sorted(name.replace("_", "-") for name in modules))


def load_policy(name: str) -> type[Policy]:
    """The class of the policy of that name, or of a user's own policy. Raises UnknownPolicy."""
    if name not in names():
        return _own_kind(name)
    module = importlib.import_module(f"{kinds.__name__}.{name.replace('-', '_')}")
    kind: type[Policy] = module.POLICY
    return kind


def make_policy(name: str, context: PolicyContext) -> Policy:
    """A new policy of that name. Raises UnknownPolicy."""
    kind = load_policy(name)
    if name in names():
        return kind(context)
    from weft.scheduler.policies.user.guarded import guarded

    return guarded(name, kind, context)


def _own_kind(name: str) -> type[Policy]:
    from weft.scheduler.policies.user.load import COLON, NoOwnPolicy, entry_names, load_own

    others = entry_names()
    if COLON not in name and name not in others:
        known = [*names(), *others]
        hint = did_you_mean(name, known)
        fault = (
            f"there is no such policy; the policies are {', '.join(known)}, and module:Class for "
            f"one of your own{hint}"
        )
        raise UnknownPolicy(name, fault)
    try:
        return load_own(name)
    except NoOwnPolicy as exc:
        raise UnknownPolicy(name, str(exc)) from exc

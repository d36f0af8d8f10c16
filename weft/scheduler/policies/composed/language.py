"""The text of `--schedule-policy`: one policy, or several from the coarsest to the finest.

    text  = level ( ">" level )*
    level = name | "fair(key)" | "module:Class"

    priority > fair(key) > lpm        classes; in a class tenants; in a tenant the longest prefix
    deadline > shortest-prefill-first among equal deadlines the shortest

This module checks words and their positions. `build.py` checks whether another policy can refine a
policy. It imports no policy of weft, so that the command line stays fast.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.scheduler.policies import UnknownPolicy, load_policy, names

ARROW = ">"
CLASSES = "priority"
TENANTS = "fair"
TENANT_WORD = "key"  # what makes a tenant: the only word allowed in the brackets of `fair`
ALONE = "static"


class PolicyText(NamedTuple):
    """The parts of a text, from the coarsest to the finest."""

    has_classes: bool
    has_tenants: bool
    orders: tuple[str, ...]  # names of policies; empty: order of arrival

    @property
    def num_levels(self) -> int:
        return self.has_classes + self.has_tenants + len(self.orders)


def parse(text: str) -> PolicyText:
    """Raises UnknownPolicy with the wrong word and what is allowed in its place."""
    words = [_word(level, text) for level in text.split(ARROW)]
    if len(words) > 1 and ALONE in words:
        raise UnknownPolicy(
            text,
            f"{ALONE!r} admits no request to a running batch, so it cannot be "
            f"combined; no {ARROW!r} is allowed beside it",
        )
    repeated = [word for word in words if words.count(word) > 1]
    if repeated:
        raise UnknownPolicy(text, f"{repeated[0]!r} is given twice; once is allowed")
    if CLASSES in words[1:]:
        raise UnknownPolicy(
            text, f"{CLASSES!r} makes classes; it is allowed only as the first word"
        )
    has_classes = words[0] == CLASSES
    rest = words[has_classes:]
    if TENANTS in rest[1:]:
        raise UnknownPolicy(
            text,
            f"{TENANTS!r} makes tenants; it is allowed only as the first word, or "
            f"directly after {CLASSES!r}",
        )
    has_tenants = rest[:1] == [TENANTS]
    return PolicyText(has_classes, has_tenants, tuple(rest[has_tenants:]))


def _word(level: str, text: str) -> str:
    """The policy that a level names."""
    name, bracket, rest = level.strip().partition("(")
    name = name.strip()
    if not name:
        known = ", ".join(names())
        raise UnknownPolicy(text, f"a policy is missing beside {ARROW!r}; the policies are {known}")
    if name not in names():
        try:
            load_policy(name)
        except UnknownPolicy as exc:
            if name == text:
                raise
            raise UnknownPolicy(text, str(exc)) from exc
    if not bracket:
        return name
    if name != TENANTS:
        raise UnknownPolicy(text, f"{name!r} takes no brackets; {TENANTS}({TENANT_WORD}) does")
    inside, closing, more = rest.partition(")")
    if not closing or more.strip():
        raise UnknownPolicy(text, f"{level.strip()!r} does not end with one ')'")
    if inside.strip() != TENANT_WORD:
        raise UnknownPolicy(
            text,
            f"{inside.strip()!r} in the brackets of {TENANTS!r} is not understood; "
            f"{TENANT_WORD!r} is allowed: a tenant is an API key (--tenant-by says what else)",
        )
    return name

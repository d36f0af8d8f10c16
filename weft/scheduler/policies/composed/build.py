"""Makes the policy that a text describes (`language.py`)."""

from __future__ import annotations

from typing import NamedTuple

from weft.scheduler.policies import UnknownPolicy, load_policy, make_policy
from weft.scheduler.policies.composed.classes import Classes
from weft.scheduler.policies.composed.language import CLASSES, TENANTS, PolicyText, parse
from weft.scheduler.policies.composed.lexicographic import LexicographicPolicy
from weft.scheduler.policies.kinds.fair import Fair
from weft.scheduler.policies.protocol import KeyPolicy, Policy, PolicyContext

LONGEST_PREFIX = ("lpm",)  # within a tenant: what `fair` alone does


class Inside(NamedTuple):
    """The part of a policy after its classes."""

    has_tenants: bool
    orders: tuple[str, ...]

    def make(self, context: PolicyContext) -> Policy:
        if not self.has_tenants:
            return _refined(self.orders, context)
        if not self.orders or self.orders == LONGEST_PREFIX:
            return Fair(context)
        return Fair(context, _refined(self.orders, context))


def build_policy(text: str, context: PolicyContext) -> Policy:
    """A new policy. Raises UnknownPolicy."""
    said = parse(text)
    if said.num_levels == 1:
        return make_policy(_only_name(said), context)
    inside = Inside(said.has_tenants, said.orders)
    if said.has_classes:
        return Classes(context, inside)
    return inside.make(context)


def why_not(text: str) -> str:
    """Why a text is no valid policy; empty if it is valid."""
    try:
        _check_refinable(parse(text).orders)
    except UnknownPolicy as exc:
        return exc.fault
    return ""


def why_no_shadow(text: str) -> str:
    """Why a text is no valid shadow policy; empty if it is valid, or if the text is empty."""
    return why_not(text) if text else ""


def _only_name(said: PolicyText) -> str:
    if said.has_classes:
        return CLASSES
    if said.has_tenants:
        return TENANTS
    return said.orders[0]


def _refined(orders: tuple[str, ...], context: PolicyContext) -> Policy:
    """An order in which each policy decides among requests that are equal under the one before."""
    if len(orders) == 1:
        return make_policy(orders[0], context)
    _check_refinable(orders)
    first = make_policy(orders[0], context)
    assert isinstance(first, KeyPolicy), "it was checked"
    return LexicographicPolicy(context, first, _refined(orders[1:], context))


def _check_refinable(orders: tuple[str, ...]) -> None:
    """Raises UnknownPolicy if a policy leaves no equal requests for the next one to order."""
    for name in orders[:-1]:
        kind = load_policy(name)
        if not issubclass(kind, KeyPolicy) or kind.order is not KeyPolicy.order:
            fault = f"{name!r} gives all requests an order, so no policy is allowed after it"
            raise UnknownPolicy(" > ".join(orders), fault)

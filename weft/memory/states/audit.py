"""The audit of states: each slot has exactly one owner.

    free + quarantined + snapshots of the cache + rows and their copies = all slots

The audit gets the slots of requests by name, and knows no request.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.arrays import IntArray
from weft.memory.accounting.audit import AccountingError, Fault, find_faults_among
from weft.memory.states.group import StateGroup

STATES = "state "  # the pool, in the report of a fault


def audit_states(group: StateGroup, owned: Mapping[str, IntArray]) -> None:
    """Check the owner of every slot. `owned` maps the name of each request to its slots.

    Raises AccountingError.
    """
    for fault in find_state_faults(group, owned):
        raise AccountingError(str(fault))
    if group.imbalance:
        raise AccountingError(f"the sum of all slots of states is off by {group.imbalance}")


def find_state_faults(group: StateGroup, owned: Mapping[str, IntArray]) -> list[Fault]:
    """The slots that do not have exactly one owner. Raises AccountingError for a slot outside of
    the pool."""
    cached = group.snapshots.owned_slots()
    return find_faults_among(group.allocator, cached, owned, pool=STATES)

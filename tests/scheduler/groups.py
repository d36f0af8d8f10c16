"""Finds the groups of layers with memory of their own, and the transfers, in the memory of a
scheduler."""

from __future__ import annotations

from weft.memory.states.group import StateGroup
from weft.memory.window.group import WindowGroup
from weft.scheduler.groups.kinds.states import StatefulLayers
from weft.scheduler.groups.kinds.windows import WindowedLayers
from weft.scheduler.kv import KvMemory
from weft.scheduler.tiers.transfers import Transfers


def find_windows(kv: KvMemory) -> WindowGroup | None:
    """The memory of layers with windows, if they have pages of their own."""
    for group in kv.groups:
        if isinstance(group, WindowedLayers):
            return group.memory
    return None


def find_states(kv: KvMemory) -> StateGroup | None:
    """The memory of layers that keep a state."""
    for group in kv.groups:
        if isinstance(group, StatefulLayers):
            return group.memory
    return None


def find_transfers(kv: KvMemory) -> Transfers | None:
    """The transfers with a store, or with another server."""
    for holder in kv.holders:
        if isinstance(holder, Transfers):
            return holder
    return None


def windows_of(kv: KvMemory) -> WindowGroup:
    windows = find_windows(kv)
    assert windows is not None, "layers with windows have no pages of their own"
    return windows


def states_of(kv: KvMemory) -> StateGroup:
    states = find_states(kv)
    assert states is not None, "no layers keep a state"
    return states

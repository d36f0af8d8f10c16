"""Groups of layers with memory of their own: schedulers that have some, and where they are found."""

from __future__ import annotations

import numpy as np

from tests.scheduler.world import EOS, VOCAB, World
from weft.memory.states.group import StateGroup
from weft.memory.window.group import WindowGroup
from weft.scheduler.groups.kinds.states import StatefulLayers
from weft.scheduler.groups.kinds.windows import WindowedLayers
from weft.scheduler.kv import KvMemory
from weft.scheduler.settings import SchedulerSettings
from weft.scheduler.tiers.transfers import Transfers

CHUNK = 128


def group_settings(**changes: object) -> SchedulerSettings:
    """Of a scheduler with ample memory for layers that keep everything; `changes` add the groups."""
    values = {
        "num_pages": 1_024,
        "page_size": 16,
        "max_running_requests": 32,
        "context_length": 4_608,
        "vocab_size": VOCAB,
        "eos_token_ids": (EOS,),
        "max_prefill_tokens": CHUNK,
        "chunked_prefill_size": CHUNK,
        **changes,
    }
    return SchedulerSettings(**values)  # type: ignore[arg-type]


def prompt(seed: int, length: int) -> list[int]:
    # Without the token that ends outputs.
    return np.random.default_rng(seed).integers(10, VOCAB, length).tolist()


def serve_alone(world: World, tokens: list[int], max_new: int = 4, **wishes: object) -> int:
    """Serve a prompt alone. Returns the tokens of it that were found in the cache."""
    id = world.send(tokens, max_new_tokens=max_new, ignore_eos=True, **wishes)
    world.run_dry(check=False)
    world.check()
    return world.finished[id].cached_tokens


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

"""Small schedulers with groups of layers that have memory of their own, and prompts for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.scheduler.world import EOS, VOCAB, World
from weft.scheduler.settings import SchedulerSettings, StateSettings, WindowSettings

CHUNK = 128


def group_settings(**changes: object) -> SchedulerSettings:
    """Of a scheduler with ample memory for layers that keep everything; `changes` add the
    groups."""
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


def serve_alone(world: World, tokens: list[int], max_new: int = 4, **wishes: Any) -> int:
    """Serve a prompt alone. Returns the tokens of it that were found in the cache."""
    id = world.send(tokens, max_new_tokens=max_new, ignore_eos=True, **wishes)
    world.run_dry(check=False)
    world.check()
    return world.finished[id].cached_tokens


def both(**changes: object) -> SchedulerSettings:
    windows = WindowSettings(window=64, num_pages=64)
    return group_settings(windows=windows, states=StateSettings(num_slots=40), **changes)

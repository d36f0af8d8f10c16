"""Many tenants with requests, and who was served how much."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import numpy as np

from tests.scheduler.world import EOS, VOCAB, World
from weft.assemble.build import scheduler_settings
from weft.config.engine import EngineConfig
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.settings import SchedulerSettings

ROWS = 12


def served_settings(**changes: object) -> SchedulerSettings:
    """What `weft serve --schedule-policy fair` runs with, on a small pool."""
    model = SimpleNamespace(
        num_layers=1,
        vocab_size=VOCAB,
        hidden_size=0,
        eos_token_ids=(EOS,),
        pooling=None,
        state_bytes=0,
        vision=None,
    )
    values = {
        "schedule_policy": "fair",
        "kv_tokens": 16_384,
        "page_size": 16,
        "max_running_requests": ROWS,
        "context_length": 4_096,
        "chunked_prefill_size": 512,
        **changes,
    }
    return scheduler_settings(EngineConfig(**values), model)  # type: ignore[arg-type]


def begun(scheduler: Scheduler, world: World, id: int) -> int | None:
    """Tokens of the prompt of a request that were in the cache; None if it has never run."""
    finish = world.finished.get(id)
    if finish is not None:
        return finish.cached_tokens if world.outputs[id] else None
    request = scheduler.requests[id]
    return request.cached_tokens if request.admitted_s >= 0 else None


def given(world: World, tenant: str) -> int:
    """The service that a tenant was given."""
    total = 0
    for id, request in world.sent.items():
        if request.tenant == tenant:
            cached = begun(world.scheduler, world, id)
            if cached is not None:
                total += len(world.prompts[id]) - cached + 2 * len(world.outputs[id])
    return total


class Crowd:
    """Tenants who always want more: `depths` says how many requests of each wait at least,
    `lengths` how long their prompts may be. Of every other tenant they begin with the same
    `num_shared` tokens."""

    def __init__(
        self,
        world: World,
        lengths: dict[str, int],
        depths: dict[str, int],
        *,
        max_new: int,
        num_shared: int = 0,
    ) -> None:
        self.world = world
        self.depths = depths
        self._lengths = lengths
        self._max_new = max_new
        self._rng = random.Random(0)
        self._tokens = np.random.default_rng(0)
        self._heads = [[self._rng.randrange(VOCAB) for _ in range(num_shared)] for _ in lengths]

    def fill_up(self) -> None:
        queue = self.world.scheduler.waiting_queue
        waiting = Counter(request.message.tenant for request in queue)
        for place, (tenant, depth) in enumerate(self.depths.items()):
            for _ in range(depth - waiting[tenant]):
                self._send(tenant, self._heads[place] if place % 2 else [])

    def _send(self, tenant: str, head: list[int]) -> None:
        rng = self._rng
        longest = self._lengths[tenant]
        num_own = max(rng.randrange(longest // 2, longest) - len(head), 1)
        prompt = [*head, *self._tokens.integers(VOCAB, size=num_own).tolist()]
        max_new = rng.randrange(1, self._max_new + 1)
        self.world.send(prompt, max_new_tokens=max_new, ignore_eos=True, tenant=tenant)

"""Worlds with stores behind the pool."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.scheduler.groups import find_transfers
from tests.scheduler.host_oracle import OracleCopies, OracleHost
from tests.scheduler.random_worlds import (
    drive,
    journal_of_failure,
    random_settings,
    with_draft_model,
    with_pins,
    with_states,
    with_windows,
)
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.tier_oracle import Blocks, OracleTiers
from tests.scheduler.world import EOS, VOCAB
from weft.messages.cache import ClearCache
from weft.messages.control import ContinueGeneration, FlushCache, PauseGeneration
from weft.messages.replies import StepOutput
from weft.messages.weights import ReleaseMemoryOccupation, ResumeMemoryOccupation
from weft.scheduler.settings import SchedulerSettings, TierSettings
from weft.scheduler.tiers.transfers import LARGEST_PART, Transfers


class TieredWorld(RecordedWorld):
    """A world with a store."""

    def __init__(
        self,
        settings: SchedulerSettings,
        depth: int,
        tiers: OracleTiers | OracleHost,
        fail_steps: set[int] | None = None,
    ) -> None:
        super().__init__(settings, depth, fail_steps, tiers=tiers)
        self.tiers = tiers
        tiers.runner = self.runner
        self.memory_rng: random.Random | None = None  # None: memory is left alone

    @property
    def transfers(self) -> Transfers:
        transfers = find_transfers(self.scheduler.kv)
        assert transfers is not None
        return transfers

    @property
    def service(self):  # type: ignore[no-untyped-def]
        return self.engine._engine.services.tiers

    def check_step(self) -> None:
        super().check_step()
        assert self.settings.tiers is not None
        for id, wait in self.service.feature.waiting.items():
            assert id in self.scheduler.requests
            assert wait.until_s <= wait.since_s + self.settings.tiers.wait_s
            # Whoever waits is let go with the first step behind its time.
            assert self.time - self.tick_s < wait.until_s
        if isinstance(self.tiers, OracleHost):
            self.tiers.check_places()
        assert self.transfers.num_owned <= self.scheduler.kv.allocator.num_pages // LARGEST_PART
        reading = [one for one in self.transfers.table.values() if one.is_reading]
        assert sum(len(one.pages) for one in reading) == self.transfers.num_owned

    def run_dry(self, check: bool = True) -> None:
        for _ in range(300):
            if not self.has_work:
                return
            self.step(check)
        raise AssertionError("there is work, and nothing happens")

    def turn(self) -> list[StepOutput]:
        if self.memory_rng is not None:
            self._disturb(self.memory_rng)
        return super().turn()

    def _disturb(self, rng: random.Random) -> None:
        """What may happen to memory beside requests."""
        if not self.has_work:
            return
        if rng.random() < 0.004:
            self.tell(FlushCache(timeout_s=rng.choice([0.0, 20.0])))
        if rng.random() < 0.002:
            self.tell(ClearCache())
        if rng.random() < 0.004:
            self.tell(PauseGeneration(mode="retract"))
            self.tell(ReleaseMemoryOccupation(tags=rng.choice([["kv_cache"], None])))
            for _ in range(rng.choice([1, 3, 10])):
                for output in super().turn():
                    self.receive(output)
                self.time += self.tick_s
            self.tell(ResumeMemoryOccupation())
            self.tell(ContinueGeneration())

    def check_idle(self) -> None:
        self.come_to_rest()
        super().check_idle()

    def come_to_rest(self) -> None:
        """Let all transfers end, or be given up."""
        self.tiers.let_all_end()
        for _ in range(5_000):
            if not self.transfers.table and not self.service.feature.worthy:
                return
            self.step()
        raise AssertionError(f"still under way: {list(self.transfers.table)}")


def with_host(
    settings: SchedulerSettings, blocks: Blocks, mood: str, seed: str
) -> tuple[SchedulerSettings, OracleHost]:
    """Memory of the host for less than the pool has, or for more; with a store of `blocks` below
    it, or without."""
    assert settings.tiers is not None
    rng = random.Random(f"with host {seed}")
    page_size = settings.page_size
    block_len = settings.tiers.block_len
    num_blocks = max(settings.num_pages * page_size * rng.choice([1, 4, 12]) // 4 // block_len, 2)
    copies = OracleCopies(num_blocks * block_len // page_size, page_size, seed)
    below = None
    if rng.random() < 0.6:
        below = OracleTiers(blocks, block_len, page_size, mood, seed, memory=copies.state)
    host = OracleHost(copies, block_len, page_size, rng.choice([0.2, 0.5, 0.9]), seed, below)
    wait_s = rng.choice([0.0, 5.0, 5.0, 40.0, 40.0])
    tiers = replace(settings.tiers, saves_evicted=True, where="host memory", wait_s=wait_s)
    return replace(settings, tiers=tiers), host


def tiered(settings: SchedulerSettings, rng: random.Random) -> SchedulerSettings:
    block_len = settings.page_size * rng.choice([1, 1, 2, 4])
    if rng.random() < 0.6:
        settings = replace(settings, num_pages=settings.num_pages * 3)
    tiers = TierSettings(
        block_len=block_len,
        block_bytes=rng.choice([1, 64_000_000, 20_000_000]),
        wait_s=rng.choice([0.0, 5.0, 5.0, 10.0, 40.0]),
        write=rng.choice(["selective", "through", "through", "back"]),
    )
    return replace(settings, prefix_cache=True, tiers=tiers)


def run_tiered(
    seed: int,
    num_requests: int = 30,
    *,
    puts_aside: bool = False,
    pins: bool = False,
    windows: bool = False,
    states: bool = False,
    draft: bool = False,
    host: bool = False,
) -> list[TieredWorld]:
    """Two worlds, the second of which finds what the first has stored: of a model some layers of
    which have windows or keep a state, or beside which another one guesses. `host`: with the memory
    of the host, alone or before the store; then memory is released and resumed now and then."""
    blocks: Blocks = {}
    worlds = []
    for run in range(2):
        rng = random.Random(f"{seed} {run}")
        settings = tiered(random_settings(random.Random(seed)), random.Random(f"tiers {seed}"))
        layers = random.Random(f"layers {seed}")
        if windows:
            settings = with_windows(settings, layers)
        if states:
            settings = with_states(settings, layers)
        if draft:
            settings = with_draft_model(settings, layers)
        if pins:
            settings = with_pins(settings, random.Random(f"pins of {seed}"))
        assert settings.tiers is not None
        mood = random.Random(f"mood {seed}").choice(["quick", "slow", "moody"])
        tiers: OracleTiers | OracleHost
        if host:
            settings, tiers = with_host(settings, blocks, mood, f"{seed} {run}")
        else:
            tiers = OracleTiers(
                blocks, settings.tiers.block_len, settings.page_size, mood, f"{seed} {run}"
            )
        depth = rng.choice([0, 1, 2])
        fails = {rng.randrange(5, 200) for _ in range(3)} if seed % 5 == 0 else set()
        world = TieredWorld(settings, depth, tiers, fails)
        if puts_aside:
            world.put_aside_often()
        if host:
            world.memory_rng = random.Random(f"memory {seed} {run}")
        with journal_of_failure(world, f"weft-tiers-{seed}-"):
            # The same families of prompts in both.
            drive(world, random.Random(seed), num_requests, pins=pins)
        worlds.append(world)
    return worlds


def small_world(
    blocks: Blocks | None = None,
    *,
    wait_s: float = 10.0,
    write: str = "selective",
    num_pages: int = 200,
    block_bytes: int = 1,
) -> TieredWorld:
    tiers = TierSettings(block_len=4, block_bytes=block_bytes, wait_s=wait_s, write=write)
    settings = SchedulerSettings(
        num_pages=num_pages,
        page_size=2,
        max_running_requests=4,
        context_length=200,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        schedule_policy="fcfs",
        tiers=tiers,
    )
    store = OracleTiers({} if blocks is None else blocks, 4, 2, "quick", "")
    store.turns_to_open = 0
    world = TieredWorld(settings, 0, store)
    world.tick_s = 0.01
    return world


def run(world: TieredWorld, prompt: list[int], **sampling: object) -> int:
    """Run a request to its end. Returns how many of its tokens were found."""
    id = world.send(prompt, max_new_tokens=2, ignore_eos=True, **sampling)
    world.run_dry()
    return world.finished[id].cached_tokens

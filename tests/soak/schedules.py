"""Random schedules of models some layers of which have windows or keep a state, and of a store of
KV: every invariant of each pool is checked after every step, every output is compared with what its
request gives alone, and journals are replayed."""

from __future__ import annotations

import logging
import time
from collections import Counter

from tests.scheduler.random_worlds import run_random
from tests.scheduler.tiered_world import run_tiered
from weft.journal.replay import Replay

NUM_REQUESTS = 12  # of one schedule
REPLAYED = 10  # of so many schedules one is replayed from its journal
REPLAYED_STORED = 4  # the same of those with a store
TOLD = 500  # after so many schedules the sums are printed
STORED_REQUESTS = 600  # of one with a store, in each of its two runs
TOLD_STORED = 5


def run_schedules(num: int, seed: int) -> Counter[str]:
    """Run so many, with windows and with states in turns. Raises AssertionError with the call that
    breaks."""
    logging.getLogger("weft").setLevel(logging.CRITICAL)
    began = time.monotonic()
    totals = Counter[str]()
    for number in range(seed, seed + num):
        layers = {"windows": number % 2 == 0, "states": number % 2 == 1}
        try:
            run_one(number, layers, totals)
        except AssertionError as exc:
            exc.add_note(f"run_random({number}, {NUM_REQUESTS}, **{layers})")
            raise
        if totals["schedules"] % TOLD == 0:
            print(f"{time.monotonic() - began:6.0f} s  {dict(totals)}", flush=True)
    print(f"{time.monotonic() - began:6.0f} s  {dict(totals)}  no broken invariant")
    return totals


def run_stored(num: int, seed: int) -> Counter[str]:
    """Run so many with a store that answers late, in part, wrongly or never, every other one with
    pinned prompts, every third one with the memory of the host, and two worlds of each. Raises
    AssertionError with the call that breaks."""
    logging.getLogger("weft").setLevel(logging.CRITICAL)
    began = time.monotonic()
    totals = Counter[str]()
    for number in range(seed, seed + num):
        kinds = {"pins": number % 2 == 0, "host": number % 3 == 0}
        call = f"run_tiered({number}, {STORED_REQUESTS}, **{kinds})"
        try:
            for world in run_tiered(number, STORED_REQUESTS, **kinds):
                stats = world.engine._engine.services.stats()
                totals.update(
                    schedules=1,
                    requests=len(world.sent),
                    steps=world.num_steps,
                    read_tokens=world.tiers.num_read,
                    written_tokens=world.tiers.num_written,
                    host_hit_tokens=world.service.feature.num_host_hits,
                    faults=world.tiers.num_faults,
                    never_answered=world.tiers.num_silent,
                    lost_pages=len(world.scheduler.kv.allocator.quarantined),
                    retractions=stats.total_retractions,
                    pins_given_way=stats.total_pins_given_way,
                )
                if number % REPLAYED_STORED == 0:
                    replay = Replay(world.records, check=True)
                    assert replay.run(), replay.difference
                    totals["replayed"] += 1
        except AssertionError as exc:
            exc.add_note(call)
            raise
        if number % TOLD_STORED == 0:
            print(f"{time.monotonic() - began:6.0f} s  {dict(totals)}", flush=True)
    print(f"{time.monotonic() - began:6.0f} s  {dict(totals)}  no broken invariant")
    return totals


def run_one(number: int, layers: dict[str, bool], totals: Counter[str]) -> None:
    world = run_random(number, NUM_REQUESTS, **layers)
    stats = world.scheduler.stats()
    totals.update(
        schedules=1,
        requests=len(world.sent),
        steps=world.num_steps,
        cached_tokens=stats.total_cached_tokens,
        retractions=stats.total_retractions,
        evicted_states=stats.total_evicted_states,
        evicted_window_tokens=stats.total_evicted_window_tokens,
    )
    if number % (2 * REPLAYED) < 2:
        replay = Replay(world.records, check=True)
        assert replay.run(), replay.difference
        assert replay.engine.scheduler.stats() == stats
        totals["replayed"] += 1

"""Random schedules for as long as one likes: `python -m tests.scheduler.long_run --requests
100000`.

Every world has other settings (page size, memory, chunks, policy, overlap, mixing); every invariant
is checked after every step, every output is compared with what the request gives on its own. In
every third world are sessions, and what they remember is compared, too; in every fourth, time cuts
prompts; in every fifth, layers with windows have pages of their own; in another fifth, layers keep
a state; in every other, tokens are guessed, rightly and wrongly. A failure names the seed of its
world.

`--faults 5000` plants so many faults instead, each into one call of a function of the scheduler's
core or of memory.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections import Counter

from tests.scheduler.faulty_world import NUM_WORLDS, Fault, counted, drawn_lateness, run_with
from tests.scheduler.random_worlds import run_random, run_timed

PER_TIMED_WORLD = 40  # requests: their prompts are long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000, help="requests in total")
    parser.add_argument(
        "--per-world", type=int, default=500, help="requests with the same settings"
    )
    parser.add_argument("--seed", type=int, default=1_000, help="seed of the first world")
    parser.add_argument("--faults", type=int, default=0, help="faults to plant")
    args = parser.parse_args()
    logging.getLogger("weft").setLevel(logging.CRITICAL if args.faults else logging.ERROR)
    if args.faults:
        plant_faults(args.faults, args.seed)
    else:
        run_schedules(args.requests, args.per_world, args.seed)


def run_schedules(num_requests: int, per_world: int, seed: int) -> None:
    began = time.monotonic()
    totals = Counter[str]()
    while totals["requests"] < num_requests:
        call = f"run_random({seed}, num_requests={per_world})"
        try:
            if seed % 4 == 3:
                call = f"run_timed({seed}, num_requests={PER_TIMED_WORLD})"
                world = run_timed(seed, num_requests=PER_TIMED_WORLD)
            else:
                layers = {
                    "windows": seed % 5 == 0,
                    "states": seed % 5 == 1,
                    "drafts": seed % 2 == 0,
                }
                call = f"run_random({seed}, num_requests={per_world}, **{layers})"
                world = run_random(seed, num_requests=per_world, **layers)
        except AssertionError:
            print(f"world {seed} broke: {call}", flush=True)
            raise
        stats = world.scheduler.stats()
        totals += Counter(
            worlds=1,
            requests=len(world.sent),
            steps=world.num_steps,
            generated_tokens=stats.total_generated_tokens,
            cached_tokens=stats.total_cached_tokens,
            retractions=stats.total_retractions,
            evicted_tokens=stats.total_evicted_tokens,
            aborted=stats.total_aborted,
            drafts=sum(count.num_drafts for count in world.scheduler.counters.drafts.values()),
            right_drafts=sum(count.num_right for count in world.scheduler.counters.drafts.values()),
            failed_steps=len(world.failures),
            refused=sum(finish.status in (400, 503) for finish in world.finished.values()),
            **{f"sessions {what}": count for what, count in world.talked.items()},
        )
        seed += 1
        if totals["worlds"] % 20 == 0:
            print(f"{time.monotonic() - began:6.0f} s  {dict(totals)}", flush=True)
    print(f"{time.monotonic() - began:6.0f} s  {dict(totals)}  no broken invariant")


def plant_faults(num_faults: int, seed: int) -> None:
    """At random calls of random functions, so that those that are called often do not get all of
    them."""
    began = time.monotonic()
    rng = random.Random(seed)
    for i in range(num_faults):
        number = rng.randrange(NUM_WORLDS)
        calls = counted(number)
        target = rng.choice(sorted(calls))
        is_late = drawn_lateness(rng, target)
        fault = Fault(target, rng.randint(1, calls[target]), is_late)
        try:
            run_with(fault, number)
        except Exception:
            print(f"world {number} broke: run_with({fault!r}, {number})", flush=True)
            raise
        if i % 200 == 199:
            print(f"{time.monotonic() - began:6.0f} s  {i + 1} faults", flush=True)
    print(
        f"{time.monotonic() - began:6.0f} s  {num_faults} faults, none with more harm than it may do"
    )


if __name__ == "__main__":
    main()

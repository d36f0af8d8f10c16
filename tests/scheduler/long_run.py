"""Random schedules for as long as one likes: `python -m tests.scheduler.long_run --requests 100000`.

Every world has other settings (page size, memory, chunks, policy, overlap, mixing); every invariant is checked after
every step, every output is compared with what the request gives on its own. In every third world are sessions, and
what they remember is compared, too. A failure names the seed of its world.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections import Counter

from tests.scheduler.test_random_schedules import run_random


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000, help="requests in total")
    parser.add_argument("--per-world", type=int, default=500, help="requests with the same settings")
    parser.add_argument("--seed", type=int, default=1_000, help="seed of the first world")
    args = parser.parse_args()
    logging.getLogger("weft").setLevel(logging.ERROR)

    began, totals, seed = time.monotonic(), Counter[str](), args.seed
    while totals["requests"] < args.requests:
        try:
            world = run_random(seed, num_requests=args.per_world)
        except AssertionError:
            print(f"world {seed} broke: run_random({seed}, num_requests={args.per_world})", flush=True)
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
            failed_steps=len(world.failures),
            refused=sum(finish.status in (400, 503) for finish in world.finished.values()),
            **{f"sessions {what}": count for what, count in world.talked.items()},
        )
        seed += 1
        if totals["worlds"] % 20 == 0:
            print(f"{time.monotonic() - began:6.0f} s  {dict(totals)}", flush=True)
    print(f"{time.monotonic() - began:6.0f} s  {dict(totals)}  no broken invariant")


if __name__ == "__main__":
    main()

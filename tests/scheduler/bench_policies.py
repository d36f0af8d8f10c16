"""What policies cost with many requests waiting: `python -m tests.scheduler.bench_policies`.
Microseconds, medians.

Steady state: 64 requests run, at every step one ends, the queue is asked for the best to take its
place, one more arrives. Prompts have 2,048 tokens; half of them begin with one of 64 shared
prefixes of 1,024, some of which are cached and some evicted. `order`: the first candidate of a
pass; `arrival`: `add_request`, index entry included; `pass`: a whole pass that admits; `twin`: the
order of lpm by looking up the prefix of every waiting request.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.plan.step import Result
from weft.scheduler import policies
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.settings import SchedulerSettings

COMPOSED = ("priority > lpm", "lof > lpm", "fair(key) > fcfs", "priority > fair(key) > lpm")
RUNNING = 64
NUM_STEPS = 150


class Scene:
    def __init__(self, policy: str, num_waiting: int) -> None:
        self.rng = np.random.default_rng(0)
        self.heads = self.rng.integers(2, 150_000, (64, 1_024), dtype=np.int32)
        self.number = 0
        self.times: dict[str, list[float]] = {"arrival": [], "order": [], "pass": []}
        self.scheduler = Scheduler(
            SchedulerSettings(
                num_pages=16_000,  # 125 prompts
                page_size=16,
                max_running_requests=RUNNING,
                context_length=4_096,
                vocab_size=150_000,
                schedule_policy=policy,
                aging_s=30.0,
                max_queued_requests=1_000_000,
                chunked_prefill_size=8_192,
                schedule_conservativeness=0.1,
                mixed_chunk=False,
            )
        )
        self.num_waiting = num_waiting
        for _ in range(num_waiting):
            self.arrive()

    def arrive(self) -> None:
        tail = self.rng.integers(2, 150_000, 2_048, dtype=np.int32)
        if self.rng.random() < 0.5:
            tail[:1_024] = self.heads[self.rng.integers(64)]
        message = GenerateRequest(
            id=self.number,
            rid="",
            input_ids=tail.tobytes(),
            sampling=SamplingParams(max_new_tokens=int(self.rng.integers(2, 60)), ignore_eos=True),
            user=str(self.number % 10),
            tenant=str(self.number % 10),
            priority=self.number % 3,
        )
        self.number += 1
        began = time.perf_counter()
        self.scheduler.add_request(message, self.number * 0.01)
        self.times["arrival"].append(time.perf_counter() - began)

    def step(self) -> None:
        scheduler = self.scheduler
        now = self.number * 0.01
        began = time.perf_counter()
        next(iter(scheduler.waiting_queue.order(now)), None)
        self.times["order"].append(time.perf_counter() - began)
        began = time.perf_counter()
        batch = scheduler.get_next_batch_to_run(now, in_flight=False)
        seconds = time.perf_counter() - began
        assert batch is not None
        if batch.prefills:
            self.times["pass"].append(seconds)
        while len(scheduler.waiting_queue) < self.num_waiting:
            self.arrive()
        scheduler.process_batch_result(
            batch, Result(tokens=np.full(len(batch.sample_rows), 5, dtype=np.int32))
        )

    def run(self) -> None:
        for _ in range(NUM_STEPS):
            self.step()

    def twin(self) -> float:
        began = time.perf_counter()
        cache = self.scheduler.kv.cache
        sorted(
            self.scheduler.waiting_queue,
            key=lambda request: -cache.peek(request.cache_key(request.packed)),
        )
        return time.perf_counter() - began


def main() -> None:
    print(f"{'':33}{'order':>10}{'worst':>10}{'arrival':>10}{'pass':>10}{'worst':>10}")
    for num_waiting in (1_000, 10_000):
        for policy in (*policies.names(), *COMPOSED):
            scene = Scene(policy, num_waiting)
            scene.run()
            order, arrival, whole = (scene.times[name] for name in ("order", "arrival", "pass"))
            values = [
                statistics.median(order),
                max(order),
                statistics.median(arrival),
                statistics.median(whole),
            ]
            values.append(max(whole))
            print(
                f"{policy:27}{num_waiting:6}" + "".join(f"{value * 1e6:10.0f}" for value in values)
            )
        print(f"{'twin of lpm':27}{num_waiting:6}{scene.twin() * 1e6:10.0f}")


if __name__ == "__main__":
    main()

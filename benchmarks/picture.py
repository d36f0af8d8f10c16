"""What a picture of the engine costs: 256 rows, a queue, and a prefix tree of ten thousand nodes, in virtual time.

python benchmarks/picture.py
"""

from __future__ import annotations

import time

import numpy as np

from weft.engine.engine import Engine
from weft.messages.picture import Watch
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.scheduler.settings import SchedulerSettings
from weft.sim.cost import CostRunner, TrueLengths, VirtualClock, read_cost

NUM_NODES = 10_000
NUM_REQUESTS = 400
NUM_PICTURES = 400
STEPS_BETWEEN = 40


def fail(exc: Exception) -> None:
    raise exc


class Bench:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.lengths = TrueLengths()
        settings = SchedulerSettings(
            num_pages=100_000,
            page_size=16,
            max_running_requests=256,
            context_length=32_768,
            chunked_prefill_size=8_192,
            vocab_size=50_000,
            eos_token_ids=(2,),
            max_queued_requests=100_000,
        )
        runner = CostRunner(read_cost("gpu"), self.clock, self.lengths)
        self.engine = Engine(settings, runner, clock=self.clock, overlap=True, on_failure=fail)
        self._rng = np.random.default_rng(0)
        self._number = 0

    def send(self, prompt_len: int, output_len: int) -> None:
        self._number += 1
        self.lengths.add(self._number, prompt_len + output_len - 1)
        ids = self._rng.integers(5, 40_000, prompt_len).astype(np.int32)
        sampling = SamplingParams(max_new_tokens=output_len, temperature=0.0, seed=self._number)
        request = GenerateRequest(
            id=self._number,
            rid=f"chatcmpl-{self._number:032x}",
            input_ids=ids.tobytes(),
            tenant="alice",
            sampling=sampling,
        )
        self.engine.submit(request)

    def steps(self, num: int) -> float:
        """Seconds of the last of so many steps."""
        began = 0.0
        for _ in range(num):
            began = time.perf_counter()
            self.engine.step()
        return time.perf_counter() - began


def main() -> None:
    bench = Bench()
    for _ in range(NUM_NODES):
        bench.send(34, 1)
    while bench.engine.has_work:
        bench.engine.step()
    for _ in range(NUM_REQUESTS):
        bench.send(400, 20_000)
    bench.steps(300)
    scheduler = bench.engine.scheduler
    num_nodes = sum(1 for _ in scheduler.kv.cache.nodes())
    print(
        f"{len(scheduler.running_batch.rows)} rows, {len(scheduler.waiting_queue)} wait, {num_nodes:,} nodes"
    )
    plain = []
    watched = []
    for number in range(NUM_PICTURES):
        plain.append(bench.steps(STEPS_BETWEEN))
        since = scheduler.planner.num_steps - STEPS_BETWEEN - 1
        bench.engine.submit(Watch(call=number, since_step=since, since_round=number // 5))
        watched.append(bench.steps(1))
    for name, values in (("a step", plain), ("a step with a picture", watched)):
        print(
            f"{name}: median {np.median(values) * 1e3:.3f} ms, p95 {np.percentile(values, 95) * 1e3:.3f} ms"
        )
    cost = np.median(watched) - np.median(plain)
    print(f"a picture: {cost * 1e3:.3f} ms")


if __name__ == "__main__":
    main()

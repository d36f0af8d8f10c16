"""What a picture of the engine costs: 256 rows, a queue, and a prefix tree of ten thousand nodes, in virtual time.

Steps that come between pictures leave little of what a picture reads in the processor's caches, as
in service. Walks over the tree are told by themselves: they go on between steps, some nodes at a time.

    python benchmarks/picture.py
"""

from __future__ import annotations

import time

import msgspec
import numpy as np

from weft.engine.engine import Engine
from weft.engine.picture.service import Pictures
from weft.messages.picture import Picture, Watch
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.scheduler.settings import SchedulerSettings
from weft.sim.cost import CostRunner, TrueLengths, VirtualClock, read_cost

NUM_NODES = 10_000
NUM_REQUESTS = 400
NUM_PICTURES = 400
STEPS_BETWEEN = 4  # which makes it five pictures a second, as with a page that is open


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

    def step(self) -> float:
        """Seconds that the next step takes; what it sends is in `sent`."""
        began = time.perf_counter()
        self.sent = self.engine.step()
        return time.perf_counter() - began

    def steps(self, num: int) -> float:
        """Seconds of the last of so many steps."""
        took = 0.0
        for _ in range(num):
            took = self.step()
        return took


class Timed:
    """Takes the time of what the engine does for viewers behind each step."""

    def __init__(self) -> None:
        self.pictures: list[float] = []
        self.others: list[float] = []
        after_step = Pictures.after_step

        def timed(service: Pictures, now: float) -> None:
            has_question = bool(service._asked)
            began = time.perf_counter()
            after_step(service, now)
            took = time.perf_counter() - began
            (self.pictures if has_question else self.others).append(took)

        Pictures.after_step = timed  # type: ignore[method-assign]


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
    num_nodes = sum(1 for _ in scheduler.kv.cache.tree.nodes())
    print(
        f"{len(scheduler.running_batch.rows)} rows, {len(scheduler.waiting_queue)} wait, {num_nodes:,} nodes"
    )
    timed = Timed()
    plain = []
    watched = []
    pictures = []
    trees = []
    round = 0
    began_s = bench.clock()
    for number in range(NUM_PICTURES):
        plain.append(bench.steps(STEPS_BETWEEN))
        since = scheduler.planner.num_steps - STEPS_BETWEEN - 1
        bench.engine.submit(Watch(call=number, since_step=since, since_round=round))
        watched.append(bench.steps(1))
        (picture,) = [one for one in bench.sent if isinstance(one, Picture)]
        size = len(msgspec.msgpack.encode(picture))
        if picture.tree is None:
            pictures.append(size)
        else:
            trees.append(size)
            round = picture.tree.round
    passed_s = bench.clock() - began_s
    print(f"{NUM_PICTURES / passed_s:.1f} pictures a second of the engine's clock")
    for name, values in (
        ("a step", plain),
        ("a step with a picture", watched),
        ("of it, the picture", timed.pictures),
        ("of other steps, notes and walks", timed.others),
    ):
        print(
            f"{name}: median {np.median(values) * 1e3:.3f} ms, "
            f"mean {np.mean(values) * 1e3:.3f}, p95 {np.percentile(values, 95) * 1e3:.3f}"
        )
    spent_s = sum(timed.pictures) + sum(timed.others)
    print(
        f"a second with a viewer: {spent_s / passed_s * 1e3:.2f} ms, {len(trees)} walks came round"
    )
    print(f"bytes: {np.median(pictures):,.0f}, with the tree {np.median(trees or [0]):,.0f}")


if __name__ == "__main__":
    main()

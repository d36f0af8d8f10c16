"""What the scheduler itself costs, in real time and without a model: steps, arrivals, orders, the prefix tree.

Two scenes. *Engine*: 256 requests decode and 1,000 wait, each with a prompt of 2,048 tokens. *Tree*: 100,000 sequences
of 64 tokens, of which one of 64 heads of 32 tokens is shared. Figures of others stand beside ours (their sources:
SGLang 0.5.23, vLLM 0.32 and mini-sglang, measured in the same scenes on 2 Zen 4 cores).
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np

from weft.arrays import IntArray
from weft.engine.engine import Engine
from weft.memory.radix import Node, RadixCache
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.plan.device import NO_DEVICE, DeviceRequest, Pending
from weft.plan.step import Plan, Result, Step
from weft.scheduler.batch import Batch
from weft.scheduler.request import Request
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.settings import SchedulerSettings

VOCAB_SIZE = 150_000
PROMPT_LEN = 2_048
NUM_RUNNING = 256
NUM_WAITING = 1_000
NUM_ADMITTED = 64  # in one pass, as a bound
SHARED_LEN = 1_024  # of the prompts that wait to be put in order
NUM_HEADS = 64

TREE_LEN = 64
TREE_SHARED = 32
OPS_PER_SAMPLE = 100  # operations of microseconds are timed together

MS, US, MB = 1e3, 1e6, 1e-6  # per second, per second, per byte
T = TypeVar("T")


class Measured(NamedTuple):
    """One figure: median and spread over its samples, what we want, and what others reach."""

    name: str
    unit: str
    median: float
    p5: float
    p95: float
    goal: float
    others: str

    @property
    def is_met(self) -> bool:
        return self.median <= self.goal


def measure(
    *, steps: int = 300, sequences: int = 100_000, orders: tuple[int, ...] = (1_000, 10_000)
) -> list[Measured]:
    """All figures: `steps` decode steps, a tree of so many sequences, orders of so many waiting requests."""
    figures = [*tree_figures(sequences)]
    for page_size in (1, 16):
        figures += engine_figures(page_size, steps)
    for num_waiting in orders:
        figures.append(order_figure(num_waiting))
    return figures


# The engine


def engine_figures(page_size: int, steps: int) -> Iterator[Measured]:
    """Arrivals fill the queue, prefill steps fill the rows with four prompts each, then all rows decode."""
    scheduler = _scheduler(page_size, steps)
    rng = np.random.default_rng(0)
    messages = [_request(i, rng, steps) for i in range(NUM_RUNNING + NUM_WAITING)]
    _settle()
    arrivals = [_seconds(partial(scheduler.add_request, message, 0.0)) for message in messages]
    prefills: list[float] = []
    decodes: list[float] = []
    while len(decodes) < steps:
        took, batch = _step(scheduler)
        if len(batch.prefills) == 4:
            prefills.append(took)
        elif len(batch.rows) == NUM_RUNNING and not batch.prefills:
            decodes.append(took)
    at = f"page {page_size}"
    yield _measured(
        f"decode step, {at}", "ms", MS, decodes, 0.15, "SGLang 0.16*, vLLM 2.8, mini-sglang 1.4"
    )
    yield _measured(f"prefill step, 4 x 2k, {at}", "ms", MS, prefills, 0.6, "SGLang 0.92, vLLM 2.7")
    yield _measured(f"arrival of a 2k prompt, {at}", "us", US, arrivals, 60, "vLLM 430-560")


def order_figure(num_waiting: int) -> Measured:
    """The cache-aware order, as in a pass after a request has left its KV to the tree.

    An order is lazy: a pass asks for no more than it can admit.
    """
    scheduler = _scheduler(1, steps=1, num_waiting=num_waiting, policy="lpm")
    rng = np.random.default_rng(0)
    heads = [_ids(rng, SHARED_LEN) for _ in range(NUM_HEADS)]
    pages: IntArray = np.arange(PROMPT_LEN, dtype=np.int32)
    for i in range(num_waiting):
        head = heads[int(rng.integers(NUM_HEADS))]
        scheduler.add_request(
            _message(i, head + _ids(rng, PROMPT_LEN - SHARED_LEN), max_new=1), 0.0
        )
    samples = []
    _settle()
    for i in range(NUM_HEADS):
        ended = heads[i] + _ids(rng, PROMPT_LEN - SHARED_LEN)
        samples.append(_seconds(partial(_order_after, scheduler, ended, pages)))
    goal = 0.5 if num_waiting <= 1_000 else 2.0
    others = "SGLang 1.15 at 120, off above 128" if num_waiting <= 1_000 else ""
    return _measured(f"cache-aware order of {num_waiting:,}", "ms", MS, samples, goal, others)


def _order_after(scheduler: Scheduler, ended: bytes, pages: IntArray) -> list[Request]:
    scheduler.kv.cache.insert("", ended, pages)
    return list(islice(scheduler.waiting_queue.order(0.0), NUM_ADMITTED))


class NoRunner:
    """For a scheduler whose steps are committed by hand."""

    def launch(self, plan: Plan) -> Step:
        raise AssertionError("no step is launched here")

    def control(self, request: DeviceRequest) -> Pending:
        return NO_DEVICE


def _scheduler(
    page_size: int, steps: int, num_waiting: int = NUM_WAITING, policy: str = "fcfs"
) -> Scheduler:
    """The scheduler with all the parts that it has in service."""
    settings = SchedulerSettings(
        num_pages=NUM_RUNNING * (PROMPT_LEN + 2 * steps + 64) // page_size * 2,
        page_size=page_size,
        max_running_requests=NUM_RUNNING,
        context_length=2 * PROMPT_LEN + 2 * steps,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(1,),
        policy=policy,
        chunked_prefill_size=4 * PROMPT_LEN,
        max_queued_requests=num_waiting + NUM_RUNNING,
    )
    engine = Engine(
        settings, NoRunner(), clock=lambda: 0.0, overlap=False, on_failure=lambda exc: None
    )
    return engine.scheduler


def _step(scheduler: Scheduler) -> tuple[float, Batch]:
    """Plan and commit a step. Returns the seconds of both, without the device's part between them."""
    began = time.perf_counter()
    batch = scheduler.get_next_batch_to_run(0.0, in_flight=False)
    planned = time.perf_counter()
    assert batch is not None
    result = Result(tokens=np.full(len(batch.sample_rows), 5, dtype=np.int32))
    resumed = time.perf_counter()
    scheduler.process_batch_result(batch, result)
    return planned - began + time.perf_counter() - resumed, batch


# The tree


def tree_figures(num_sequences: int) -> Iterator[Measured]:
    """Build the tree; then full hits, locks, and evictions."""
    rng = np.random.default_rng(0)
    heads = [_ids(rng, TREE_SHARED) for _ in range(NUM_HEADS)]
    tails = _ids(rng, num_sequences * (TREE_LEN - TREE_SHARED))
    tail_bytes = len(tails) // num_sequences
    owners = rng.integers(NUM_HEADS, size=num_sequences).tolist()
    sequences = [
        heads[owner] + tails[i * tail_bytes : (i + 1) * tail_bytes]
        for i, owner in enumerate(owners)
    ]
    pages: IntArray = np.arange(num_sequences * TREE_LEN, dtype=np.int32)
    cache = RadixCache(page_size=1)
    offers = [
        (sequence, pages[i * TREE_LEN : (i + 1) * TREE_LEN]) for i, sequence in enumerate(sequences)
    ]
    _settle()
    inserts = _timed(lambda offer: cache.insert("", *offer), offers)
    probes = [sequences[i] for i in rng.integers(num_sequences, size=10_000).tolist()]
    matches = _timed(lambda probe: cache.match("", probe), probes)
    nodes = [cache.match("", probe).handle for probe in probes]

    def lock_and_unlock(node: Node) -> None:
        cache.lock(node)
        cache.unlock(node)

    locks = _timed(lock_and_unlock, nodes)
    rounds = min(20, cache.evictable_pages // 2_048)
    evictions = [_seconds(lambda: cache.evict(2_048)) for _ in range(rounds)]
    others = "SGLang Rust {}, Python {}".format
    yield _measured("tree: full-hit match", "us", US, matches, 3, others("6.3", 14))
    yield _measured("tree: insert", "us", US, inserts, 5, others("17.8", 25))
    yield _measured("tree: lock + unlock", "us", US, locks, 1, "SGLang Rust 4.8")
    yield _measured("tree: evict 2,048 tokens", "ms", MS, evictions, 0.25, others("4.1", 50))
    yield _measured(
        f"tree: memory, {num_sequences:,} sequences",
        "MB",
        MB,
        [_tree_bytes(offers)],
        80,
        others(130, 145),
    )


def _tree_bytes(offers: Sequence[tuple[bytes, IntArray]]) -> int:
    """What a second tree of the same sequences allocates; how far the process grows depends on what it had freed."""
    tracemalloc.start()
    try:
        cache = RadixCache(page_size=1)
        for offer in offers:
            cache.insert("", *offer)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


# Tools


def _timed(operation: Callable[[T], object], arguments: Sequence[T]) -> list[float]:
    """Seconds of one operation, for each group of OPS_PER_SAMPLE."""
    samples = []
    for first in range(0, len(arguments), OPS_PER_SAMPLE):
        group = arguments[first : first + OPS_PER_SAMPLE]
        began = time.perf_counter()
        for argument in group:
            operation(argument)
        samples.append((time.perf_counter() - began) / len(group))
    return samples


def _seconds(operation: Callable[[], object]) -> float:
    began = time.perf_counter()
    operation()
    return time.perf_counter() - began


def _settle() -> None:
    """As the engine does when it is ready: what exists is not looked through again."""
    gc.collect()
    gc.freeze()


def _measured(
    name: str, unit: str, scale: float, samples: list[float], goal: float, others: str
) -> Measured:
    p5, median, p95 = (np.percentile(samples, (5, 50, 95)) * scale).tolist()
    return Measured(name, unit, median, p5, p95, goal, others)


def _request(number: int, rng: np.random.Generator, steps: int) -> GenerateRequest:
    return _message(number, _ids(rng, PROMPT_LEN), max_new=2 * steps)


def _message(number: int, packed: bytes, *, max_new: int) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=max_new, ignore_eos=True)
    return GenerateRequest(id=number, rid=str(number), input_ids=packed, sampling=sampling)


def _ids(rng: np.random.Generator, length: int) -> bytes:
    return rng.integers(2, VOCAB_SIZE, length, dtype=np.int32).tobytes()

"""`weft bench scheduler`: what the scheduler itself costs, in real time and without a model.

Two workloads. *Engine*: 256 requests decode and 1,000 wait, each with a prompt of 2,048 tokens.
*Tree*: 100,000 sequences of 64 tokens, each of which begins with one of 64 heads of 32 tokens.
`docs/understand/performance.md` has the times of other engines for the same.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np

from weft.arrays import IntArray
from weft.bench.results import write_json
from weft.config.options import Settings, option
from weft.engine.engine import Engine
from weft.memory.prefix_cache import CacheKey
from weft.memory.radix import Node, RadixCache
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.plan.device import NO_DEVICE, DeviceRequest, Pending
from weft.plan.step import Plan, Result, Step
from weft.scheduler.batch import Batch
from weft.scheduler.request import Request
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.settings import SchedulerSettings
from weft.sim.table import number, table

VOCAB_SIZE = 150_000
PROMPT_LEN = 2_048
NUM_RUNNING = 256
NUM_WAITING = 1_000
NUM_ADMITTED = 64  # in one pass, as a bound
SHARED_LEN = 1_024  # of the prompts that wait to be put in order
NUM_HEADS = 64

TREE_LEN = 64
TREE_SHARED = 32
EVICTED_PAGES = 2_048
OPS_PER_SAMPLE = 100  # operations of microseconds are timed together

MS = 1e3  # a second
US = 1e6
MB = 1e-6  # a byte
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SchedulerBenchOptions:
    steps: int = option(300, "decode steps to time", group="bench", everyday=True, low=1)
    sequences: int = option(
        100_000, "sequences in the prefix tree", group="bench", everyday=True, low=1_000
    )
    json: str = option("", "file for the figures as JSON", group="bench", everyday=True)


class OverheadFigure(NamedTuple):
    """Median and spread over the samples of one operation, and what we want."""

    name: str
    unit: str
    median: float
    p5: float
    p95: float
    goal: float

    @property
    def is_met(self) -> bool:
        return self.median <= self.goal

    @classmethod
    def of(
        cls, name: str, unit: str, scale: float, samples: Sequence[float], goal: float
    ) -> OverheadFigure:
        """`scale`: units in a second, or in a byte."""
        scaled = np.percentile(samples, (5, 50, 95)) * scale
        p5, median, p95 = scaled.tolist()
        return cls(name, unit, median, p5, p95, goal)


def bench_scheduler(settings: Settings) -> int:
    options = settings.make(SchedulerBenchOptions)
    figures = measure(steps=options.steps, sequences=options.sequences)
    rows = []
    results = []
    for figure in figures:
        verdict = "missed"
        if figure.is_met:
            verdict = "met"
        row = [
            figure.name,
            number(figure.median),
            f"{number(figure.p5)}-{number(figure.p95)}",
            figure.unit,
            number(figure.goal),
            verdict,
        ]
        rows.append(row)
        results.append(figure._asdict() | {"is_met": figure.is_met})
    header = ["", "median", "p5-p95", "", "goal", ""]
    print(table(header, rows))
    write_json(options.json, "scheduler", {}, results)
    return 0


def measure(
    *, steps: int = 300, sequences: int = 100_000, orders: tuple[int, ...] = (1_000, 10_000)
) -> list[OverheadFigure]:
    """All figures: `steps` decode steps, a tree of `sequences`,
    orders of these numbers of waiting requests.
    """
    figures = [*tree_figures(sequences)]
    for page_size in (1, 16):
        figures += engine_figures(page_size, steps)
    for num_waiting in orders:
        figures.append(order_figure(num_waiting))
    return figures


# The engine


def engine_figures(page_size: int, steps: int) -> Iterator[OverheadFigure]:
    """Arrivals fill the queue, prefill steps fill the rows with four prompts each,
    then all rows decode.
    """
    scheduler = _scheduler(page_size, steps)
    rng = np.random.default_rng(0)
    # The messages exist before the clock runs: only their arrival is timed.
    messages = [_request(i, rng, steps) for i in range(NUM_RUNNING + NUM_WAITING)]
    _settle()
    arrivals = []
    for message in messages:
        arrive = partial(scheduler.add_request, message, 0.0)
        arrivals.append(_seconds(arrive))
    prefills: list[float] = []
    decodes: list[float] = []
    while len(decodes) < steps:
        took, batch = _step(scheduler)
        num_prefills = len(batch.prefills)
        is_full = len(batch.rows) == NUM_RUNNING
        # Steps that are neither, such as the last prefill with fewer prompts, are left out.
        if num_prefills == 4:
            prefills.append(took)
        elif is_full and not num_prefills:
            decodes.append(took)
    at = f"page {page_size}"
    yield OverheadFigure.of(f"decode step, {at}", "ms", MS, decodes, 0.15)
    yield OverheadFigure.of(f"prefill step, 4 x 2k, {at}", "ms", MS, prefills, 0.6)
    yield OverheadFigure.of(f"arrival of a 2k prompt, {at}", "us", US, arrivals, 60)


def order_figure(num_waiting: int) -> OverheadFigure:
    """The cache-aware order, as in a pass after a request has left its KV to the tree.

    An order is lazy: a pass asks for no more than it can admit.
    """
    scheduler = _scheduler(1, steps=1, num_waiting=num_waiting, policy="lpm")
    rng = np.random.default_rng(0)
    heads = [_ids(rng, SHARED_LEN) for _ in range(NUM_HEADS)]
    own_len = PROMPT_LEN - SHARED_LEN
    pages: IntArray = np.arange(PROMPT_LEN, dtype=np.int32)
    for i in range(num_waiting):
        drawn = int(rng.integers(NUM_HEADS))
        prompt = heads[drawn] + _ids(rng, own_len)
        message = _message(i, prompt, max_new=1)
        scheduler.add_request(message, 0.0)
    samples = []
    _settle()
    for head in heads:
        ended = head + _ids(rng, own_len)
        order = partial(_order_after, scheduler, ended, pages)
        samples.append(_seconds(order))
    goal = 2.0
    if num_waiting <= 1_000:
        goal = 0.5
    return OverheadFigure.of(f"cache-aware order of {num_waiting:,}", "ms", MS, samples, goal)


def _order_after(scheduler: Scheduler, ended: bytes, pages: IntArray) -> list[Request]:
    key = CacheKey("", ended)
    scheduler.kv.cache.insert(key, pages)
    order = scheduler.waiting_queue.order(0.0)
    return list(islice(order, NUM_ADMITTED))


class NoRunner:
    """For a scheduler whose steps are committed by hand."""

    def launch(self, plan: Plan) -> Step:
        raise AssertionError("no step is launched here")

    def control(self, request: DeviceRequest) -> Pending:
        return NO_DEVICE


def _scheduler(
    page_size: int,
    steps: int,
    num_waiting: int = NUM_WAITING,
    policy: str = "fcfs",
) -> Scheduler:
    """The scheduler with all the features that it has in service."""
    num_tokens = NUM_RUNNING * (PROMPT_LEN + 2 * steps + 64)
    settings = SchedulerSettings(
        num_pages=num_tokens // page_size * 2,
        page_size=page_size,
        max_running_requests=NUM_RUNNING,
        context_length=2 * PROMPT_LEN + 2 * steps,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(1,),
        schedule_policy=policy,
        chunked_prefill_size=4 * PROMPT_LEN,
        max_queued_requests=num_waiting + NUM_RUNNING,
        mixed_chunk=False,
        aging_s=0.0,
    )
    engine = Engine(
        settings,
        NoRunner(),
        clock=lambda: 0.0,
        overlap=False,
        on_failure=lambda exc: None,
    )
    return engine.scheduler


def _step(scheduler: Scheduler) -> tuple[float, Batch]:
    """Plan and commit a step. Returns the seconds of both,
    without the device's part between them.
    """
    began = time.perf_counter()
    batch = scheduler.get_next_batch_to_run(0.0, in_flight=False)
    planned = time.perf_counter()
    assert batch is not None
    num_samples = len(batch.sample_rows)
    result = Result(tokens=np.full(num_samples, 5, dtype=np.int32))
    resumed = time.perf_counter()
    scheduler.process_batch_result(batch, result)
    ended = time.perf_counter()
    return planned - began + ended - resumed, batch


# The tree


def tree_figures(num_sequences: int) -> Iterator[OverheadFigure]:
    """Build the tree; then full hits, locks, and evictions."""
    rng = np.random.default_rng(0)
    sequences = _sequences(rng, num_sequences)
    pages: IntArray = np.arange(num_sequences * TREE_LEN, dtype=np.int32)
    cache = RadixCache(page_size=1)
    offers: list[tuple[CacheKey, IntArray]] = []
    for i, sequence in enumerate(sequences):
        first = i * TREE_LEN
        own_pages = pages[first : first + TREE_LEN]
        key = CacheKey("", sequence)
        offers.append((key, own_pages))
    _settle()
    inserts = _timed(lambda offer: cache.insert(*offer), offers)
    drawn = rng.integers(num_sequences, size=10_000).tolist()
    probes = [CacheKey("", sequences[i]) for i in drawn]
    matches = _timed(lambda probe: cache.match(probe), probes)
    nodes = []
    for probe in probes:
        match = cache.match(probe)
        nodes.append(match.handle)

    def lock_and_unlock(node: Node) -> None:
        cache.lock(node)
        cache.unlock(node)

    locks = _timed(lock_and_unlock, nodes)
    rounds = min(20, cache.evictable_pages // EVICTED_PAGES)
    evict = partial(cache.evict, EVICTED_PAGES)
    evictions = [_seconds(evict) for _ in range(rounds)]
    yield OverheadFigure.of("tree: full-hit match", "us", US, matches, 3)
    yield OverheadFigure.of("tree: insert", "us", US, inserts, 5)
    yield OverheadFigure.of("tree: lock + unlock", "us", US, locks, 1)
    yield OverheadFigure.of("tree: evict 2,048 tokens", "ms", MS, evictions, 0.25)
    name = f"tree: memory, {num_sequences:,} sequences"
    yield OverheadFigure.of(name, "MB", MB, [_tree_bytes(offers)], 80)


def _sequences(rng: np.random.Generator, num_sequences: int) -> list[bytes]:
    """Packed token ids: each a head that others have, too, and a tail of its own."""
    heads = [_ids(rng, TREE_SHARED) for _ in range(NUM_HEADS)]
    tail_len = TREE_LEN - TREE_SHARED
    tails = _ids(rng, num_sequences * tail_len)
    tail_bytes = len(tails) // num_sequences
    drawn = rng.integers(NUM_HEADS, size=num_sequences).tolist()
    sequences = []
    for i, head in enumerate(drawn):
        begin = i * tail_bytes
        tail = tails[begin : begin + tail_bytes]
        sequences.append(heads[head] + tail)
    return sequences


def _tree_bytes(offers: Sequence[tuple[CacheKey, IntArray]]) -> int:
    """What a second tree of the same sequences allocates;
    how far the process grows depends on what it had freed.
    """
    tracemalloc.start()
    try:
        cache = RadixCache(page_size=1)
        for offer in offers:
            cache.insert(*offer)
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
        seconds = time.perf_counter() - began
        samples.append(seconds / len(group))
    return samples


def _seconds(operation: Callable[[], object]) -> float:
    began = time.perf_counter()
    operation()
    return time.perf_counter() - began


def _settle() -> None:
    """As the engine does when it is ready: the collector does not visit existing objects again."""
    gc.collect()
    gc.freeze()


def _request(number: int, rng: np.random.Generator, steps: int) -> GenerateRequest:
    prompt = _ids(rng, PROMPT_LEN)
    return _message(number, prompt, max_new=2 * steps)


def _message(number: int, packed: bytes, *, max_new: int) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=max_new, ignore_eos=True)
    return GenerateRequest(
        id=number,
        rid=str(number),
        input_ids=packed,
        sampling=sampling,
    )


def _ids(rng: np.random.Generator, length: int) -> bytes:
    ids = rng.integers(2, VOCAB_SIZE, length, dtype=np.int32)
    return ids.tobytes()

"""`weft bench scheduler`: the cost of the scheduler itself, in real time and without a model.

Two workloads. *Engine*: 256 requests decode and 1,000 wait, each with a prompt of 2,048 tokens.
*Tree*: 100,000 sequences of 64 tokens, each of which begins with one of 64 heads of 32 tokens.
`docs/understand/comparisons.md` has the times of other engines for the same workloads.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np

from weft.arrays import IntArray
from weft.bench.overhead import (
    MS,
    US,
    VOCAB_SIZE,
    NoRunner,
    OverheadFigure,
    draw_ids,
    message_of,
    seconds_of,
    settle,
    timed_step,
)
from weft.bench.results import write_json
from weft.bench.scale import scale_figures
from weft.config.options import Settings, option
from weft.engine.engine import Engine
from weft.memory.prefix_cache import CacheKey
from weft.memory.radix.cache import RadixCache
from weft.memory.radix.tree import Node
from weft.messages.requests import GenerateRequest
from weft.scheduler.request import Request
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.settings import SchedulerSettings
from weft.sim.table import number, table

PROMPT_LEN = 2_048
NUM_RUNNING = 256
NUM_WAITING = 1_000
NUM_ADMITTED = 64  # most requests that one pass admits
SHARED_LEN = 1_024  # shared tokens of the prompts that wait for an order
NUM_HEADS = 64

USUAL_SEQUENCES = 100_000
TREE_LEN = 64
TREE_SHARED = 32
EVICTED_PAGES = 2_048
OPS_PER_SAMPLE = 100  # operations that take microseconds are timed in groups

MB = 1e-6  # units per byte
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SchedulerBenchOptions:
    steps: int = option(300, "decode steps to time", group="bench", everyday=True, low=1)
    sequences: int = option(
        USUAL_SEQUENCES, "sequences in the prefix tree", group="bench", everyday=True, low=1_000
    )
    scale: bool = option(
        False,
        "also measure 4,096 running and 100,000 waiting requests, under every policy",
        group="bench",
        everyday=True,
    )
    json: str = option(
        "",
        "file for the figures as JSON",
        group="bench",
        everyday=True,
        judge="weft.config.outputs:wrong_file",
    )


def bench_scheduler(settings: Settings) -> int:
    options = settings.make(SchedulerBenchOptions)
    figures = measure(steps=options.steps, sequences=options.sequences)
    if options.scale:
        figures += scale_figures()
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
    *, steps: int = 300, sequences: int = USUAL_SEQUENCES, orders: tuple[int, ...] = (1_000, 10_000)
) -> list[OverheadFigure]:
    """All figures: `steps` decode steps, a tree of `sequences`, and the order of the given numbers
    of waiting requests."""
    figures = [*tree_figures(sequences)]
    for page_size in (1, 16):
        figures += engine_figures(page_size, steps)
    for num_waiting in orders:
        figures.append(order_figure(num_waiting))
    return figures


# The engine


def engine_figures(page_size: int, steps: int) -> Iterator[OverheadFigure]:
    """Arrivals fill the queue, prefill steps fill the rows with four prompts each, then all rows
    decode."""
    scheduler = _scheduler(page_size, steps)
    rng = np.random.default_rng(0)
    # The messages are made before the clock starts: only their arrival is timed.
    messages = [_request(i, rng, steps) for i in range(NUM_RUNNING + NUM_WAITING)]
    settle()
    arrivals = []
    for message in messages:
        arrive = partial(scheduler.add_request, message, 0.0)
        arrivals.append(seconds_of(arrive))
    prefills: list[float] = []
    decodes: list[float] = []
    while len(decodes) < steps:
        took, batch = timed_step(scheduler)
        num_prefills = len(batch.prefills)
        is_full = len(batch.rows) == NUM_RUNNING
        # Other steps, such as the last prefill with fewer prompts, are left out.
        if num_prefills == 4:
            prefills.append(took)
        elif is_full and not num_prefills:
            decodes.append(took)
    at = f"page {page_size}"
    yield OverheadFigure.of(f"decode step, {at}", "ms", MS, decodes, 0.15)
    yield OverheadFigure.of(f"prefill step, 4 x 2k, {at}", "ms", MS, prefills, 0.6)
    yield OverheadFigure.of(f"arrival of a 2k prompt, {at}", "us", US, arrivals, 60)


def order_figure(num_waiting: int) -> OverheadFigure:
    """The cache-aware order, as in a pass after an ended request has inserted its KV into the tree.

    The order is lazy: a pass takes no more requests than it can admit.
    """
    scheduler = _scheduler(1, steps=1, num_waiting=num_waiting, policy="lpm")
    rng = np.random.default_rng(0)
    heads = [draw_ids(rng, SHARED_LEN) for _ in range(NUM_HEADS)]
    own_len = PROMPT_LEN - SHARED_LEN
    pages: IntArray = np.arange(PROMPT_LEN, dtype=np.int32)
    for i in range(num_waiting):
        drawn = int(rng.integers(NUM_HEADS))
        prompt = heads[drawn] + draw_ids(rng, own_len)
        message = message_of(i, prompt, max_new=1)
        scheduler.add_request(message, 0.0)
    samples = []
    settle()
    for head in heads:
        ended = head + draw_ids(rng, own_len)
        order = partial(_order_after, scheduler, ended, pages)
        samples.append(seconds_of(order))
    goal = 2.0
    if num_waiting <= 1_000:
        goal = 0.5
    return OverheadFigure.of(f"cache-aware order of {num_waiting:,}", "ms", MS, samples, goal)


def _order_after(scheduler: Scheduler, ended: bytes, pages: IntArray) -> list[Request]:
    key = CacheKey("", ended)
    scheduler.kv.cache.insert(key, pages)
    order = scheduler.waiting_queue.order(0.0)
    return list(islice(order, NUM_ADMITTED))


def _scheduler(
    page_size: int,
    steps: int,
    num_waiting: int = NUM_WAITING,
    policy: str = "fcfs",
) -> Scheduler:
    """The scheduler with all features that it has in service."""
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


# The tree


def tree_figures(num_sequences: int) -> Iterator[OverheadFigure]:
    """Build the tree; then measure full hits, locks, and evictions."""
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
    settle()
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
    evictions = [seconds_of(evict) for _ in range(rounds)]
    match_goal, lock_goal, bytes_goal = 3.0, 1.0, 800
    if num_sequences > USUAL_SEQUENCES:
        # The processor's caches hold less of such a tree.
        match_goal, lock_goal, bytes_goal = 5.0, 1.5, 600
    yield OverheadFigure.of("tree: full-hit match", "us", US, matches, match_goal)
    yield OverheadFigure.of("tree: insert", "us", US, inserts, 5)
    yield OverheadFigure.of("tree: lock + unlock", "us", US, locks, lock_goal)
    yield OverheadFigure.of("tree: evict 2,048 tokens", "ms", MS, evictions, 0.25)
    name = f"tree: memory, {num_sequences:,} sequences"
    goal = bytes_goal * num_sequences * MB
    yield OverheadFigure.of(name, "MB", MB, [_tree_bytes(offers)], goal)


def _sequences(rng: np.random.Generator, num_sequences: int) -> list[bytes]:
    """Packed token ids: each is a shared head and its own tail."""
    heads = [draw_ids(rng, TREE_SHARED) for _ in range(NUM_HEADS)]
    tail_len = TREE_LEN - TREE_SHARED
    tails = draw_ids(rng, num_sequences * tail_len)
    tail_bytes = len(tails) // num_sequences
    drawn = rng.integers(NUM_HEADS, size=num_sequences).tolist()
    sequences = []
    for i, head in enumerate(drawn):
        begin = i * tail_bytes
        tail = tails[begin : begin + tail_bytes]
        sequences.append(heads[head] + tail)
    return sequences


def _tree_bytes(offers: Sequence[tuple[CacheKey, IntArray]]) -> int:
    """The memory that a second tree of the same sequences allocates. (The growth of the process
    would depend on earlier freed memory.)"""
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
    """Mean seconds of one operation, for each group of OPS_PER_SAMPLE."""
    samples = []
    for first in range(0, len(arguments), OPS_PER_SAMPLE):
        group = arguments[first : first + OPS_PER_SAMPLE]
        began = time.perf_counter()
        for argument in group:
            operation(argument)
        seconds = time.perf_counter() - began
        samples.append(seconds / len(group))
    return samples


def _request(number: int, rng: np.random.Generator, steps: int) -> GenerateRequest:
    prompt = draw_ids(rng, PROMPT_LEN)
    return message_of(number, prompt, max_new=2 * steps)

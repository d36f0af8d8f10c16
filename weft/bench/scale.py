"""`weft bench scheduler --scale on`: the scheduler with 4,096 running and 100,000 waiting requests,
in real time and without a model.

Prompts are short (32 tokens), because this measures costs that grow with the number of requests,
not with their length. Half of each prompt is one of 64 heads. Requests differ in priority, tenant,
length and deadline, so that every policy has to decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import msgspec
import numpy as np

from weft.bench.overhead import (
    MS,
    VOCAB_SIZE,
    NoRunner,
    OverheadFigure,
    draw_ids,
    message_of,
    seconds_of,
    settle,
    timed_step,
)
from weft.engine.deadline_service import REST_S
from weft.engine.engine import Engine
from weft.memory.prefix_cache import CacheKey
from weft.messages.requests import Abort
from weft.scheduler import policies
from weft.scheduler.estimate.wait import MAX_COUNTED, WaitEstimator
from weft.scheduler.pace.pace import Pace
from weft.scheduler.pace.step_cost import StepLoad
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.settings import SchedulerSettings

HEAD_LEN = 16
PROMPT_LEN = 32
NUM_HEADS = 64
MAX_NEW = 2_000
AGING_S = 5.0
NUM_CLASSES = 3
NUM_TENANTS = 50
TTFT_MS = 60_000
# In addition to each single policy.
COMPOSED = ("priority > lpm", "fair(key) > deadline", "priority > fair(key) > lpm")
NUM_DECODES = 100
NUM_ADMISSIONS = 20
NUM_TOGETHER = 50  # requests with a deadline that arrive at once
NUM_ESTIMATES = 9
# Assumed costs of a decode step and of a step with a prompt.
DECODE_S, PREFILL_S = 0.02, 0.1
WALK_GOAL_MS = 0.1 * REST_S * MAX_COUNTED * MS


def scale_figures(
    num_running: int = 4_096, num_waiting: int = 100_000, family: int = 10_000
) -> Iterator[OverheadFigure]:
    """A decode step; under each policy, the plan of a step that admits one request, and the
    estimates of waits; and the mass move of requests that get a shared prefix."""
    scheduler = _full("fcfs", num_running, num_waiting)
    decodes = [timed_step(scheduler)[0] for _ in range(NUM_DECODES)]
    at = f"{num_running:,} running, {num_waiting:,} waiting"
    yield OverheadFigure.of(f"decode step, {at}", "ms", MS, decodes, 0.3)
    for name in (*policies.names(), *COMPOSED):
        # This policy admits no request while its batch decodes.
        if name == "static":
            continue
        scheduler.set_policy(name)
        # The first pass sorts all waiting requests.
        _admission(scheduler)
        admissions = [_admission(scheduler) for _ in range(NUM_ADMISSIONS)]
        yield OverheadFigure.of(f"first admission, {name}", "ms", MS, admissions, 1.0)
        waits = _estimates(scheduler, num_running + num_waiting)
        label = f"waits of {NUM_TOGETHER} newcomers, {name}"
        yield OverheadFigure.of(label, "ms", MS, waits, WALK_GOAL_MS)
    moves = [_mass_move(number, family) for number in range(5)]
    yield OverheadFigure.of(f"{family:,} get a shared prefix", "ms", MS, moves, 1.0)


def _full(policy: str, num_running: int, num_waiting: int) -> Scheduler:
    """A scheduler whose rows all decode, with a queue of waiting requests."""
    # The most that all of them may need, so that no request waits for memory.
    tokens = num_running * (PROMPT_LEN + 2 * MAX_NEW)
    settings = SchedulerSettings(
        num_pages=tokens // 16,
        page_size=16,
        max_running_requests=num_running,
        context_length=PROMPT_LEN + 2 * MAX_NEW,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(1,),
        schedule_policy=policy,
        # All running requests in one step.
        chunked_prefill_size=num_running * PROMPT_LEN * 2,
        max_prefill_tokens=num_running * PROMPT_LEN * 2,
        max_queued_requests=num_running + num_waiting,
        mixed_chunk=False,
        aging_s=AGING_S,
        schedule_conservativeness=0.0,
    )
    engine = Engine(
        settings,
        NoRunner(),
        clock=lambda: 0.0,
        overlap=False,
        on_failure=lambda exc: None,
    )
    scheduler = engine.scheduler
    rng = np.random.default_rng(0)
    for number in range(num_running):
        scheduler.add_request(message_of(number, draw_ids(rng, PROMPT_LEN), max_new=MAX_NEW), 0.0)
    while len(scheduler.running_batch.rows) < num_running:
        timed_step(scheduler)
    heads = [draw_ids(rng, HEAD_LEN) for _ in range(NUM_HEADS)]
    drawn = rng.integers(1_000, size=(num_waiting, 4)).tolist()
    for number, (a, b, c, d) in enumerate(drawn, start=num_running):
        own_len = PROMPT_LEN - HEAD_LEN - a % HEAD_LEN
        prompt = heads[number % NUM_HEADS] + draw_ids(rng, own_len)
        message = message_of(number, prompt, max_new=MAX_NEW - b)
        message = msgspec.structs.replace(
            message,
            priority=c % NUM_CLASSES,
            tenant=f"tenant {d % NUM_TENANTS}",
            ttft_ms=TTFT_MS + a,
        )
        scheduler.add_request(message, 0.0)
    settle()
    return scheduler


def _admission(scheduler: Scheduler) -> float:
    """End one running request, so that a waiting one takes its row. Returns the seconds of that
    step."""
    first = scheduler.kv.columns.requests[scheduler.running_batch.rows[0]]
    scheduler.abort(Abort(ids=(first.id,)))
    took, batch = timed_step(scheduler)
    assert len(batch.prefills) == 1, "nothing was admitted"
    timed_step(scheduler)
    return took


def _estimates(scheduler: Scheduler, num_requests: int) -> list[float]:
    """Seconds of walks over the queue that estimate the waits of the last arrivals."""
    pace = Pace(scheduler.settings, scheduler.kv.columns, scheduler.running_batch)
    num_running = len(scheduler.running_batch.rows)
    decodes = StepLoad(
        tokens=num_running,
        pairs=num_running * PROMPT_LEN,
    )
    prompts = StepLoad(
        tokens=10 * num_running,
        pairs=10 * num_running * PROMPT_LEN,
    )
    pace.cost.observe(decodes, DECODE_S, has_prefill=False)
    pace.cost.observe(prompts, PREFILL_S, has_prefill=True)
    estimator = WaitEstimator(
        scheduler.settings,
        kv=scheduler.kv,
        queue=scheduler.waiting_queue,
        pace=pace,
        counters=scheduler.counters,
    )
    last = range(num_requests - NUM_TOGETHER, num_requests)
    wanted = {id: math.inf for id in last if id in scheduler.requests}

    def walk() -> None:
        assert estimator.first_tokens_s(wanted, 0.0, []).keys() == wanted.keys()

    return [seconds_of(walk) for _ in range(NUM_ESTIMATES)]


def _mass_move(number: int, family: int) -> float:
    """Seconds to insert a prefix that `family` waiting requests share, and to order the queue after
    it."""
    scheduler = _full("lpm", 1, 0)
    rng = np.random.default_rng(number)
    shared = draw_ids(rng, HEAD_LEN)
    for i in range(family):
        prompt = shared + draw_ids(rng, PROMPT_LEN - HEAD_LEN)
        scheduler.add_request(message_of(i + 1, prompt, max_new=1), 0.0)
    cache = scheduler.kv.cache
    pages = np.arange(1, dtype=np.int32)

    def insert_and_order() -> None:
        cache.insert(CacheKey("", shared), pages)
        list(islice(scheduler.waiting_queue.order(0.0), 1))

    return seconds_of(insert_and_order)

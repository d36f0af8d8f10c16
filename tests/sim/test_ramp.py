"""Gradual recovery after a block of the input (`scheduler/pace/ramp.py`), in virtual time."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise

import numpy as np

from tests.sim.scene import SCENE
from weft.engine.engine import Engine
from weft.messages.codec import FromEngine, ToEngine
from weft.messages.control import BlockInput, UnblockInput
from weft.messages.replies import StepOutput
from weft.scheduler.pace.step_cost import CostModel
from weft.sim.outcome import DONE
from weft.sim.run import Clock, Record, simulate
from weft.sim.trace import Arrival, Segment

SETTINGS = replace(
    SCENE,
    num_pages=40_000,
    context_length=8_192,
    chunked_prefill_size=512,
    max_running_requests=64,
    schedule_policy="fcfs",
    max_step_ms=0.0,
    max_slowdown=-1.0,
)
# A step takes 50 ms, and 1 ms for each token. A prompt of 100 tokens in a step of its own takes 150
# ms, so
# that 4 a second leave 8 decode steps.
STEP = CostModel(0.050, 0.001, 0.0)
PROMPT = 100
OUTPUT = 10
CAPACITY = 4  # requests a second
NUM_STREAMS = 4
RAMP_S = 180.0
BLOCK_S = 60.0
UNBLOCK_S = 90.0
END_S = 280.0


class Blocked:
    """The engine of a run, whose input is blocked for 30 s. It notes the times between the tokens
    of the streams."""

    def __init__(self, engine: Engine, clock: Clock, ramp_s: float) -> None:
        self._engine = engine
        self._clock = clock
        self._todo = [
            (BLOCK_S, BlockInput(call=1)),
            (UNBLOCK_S, UnblockInput(call=2, ramp_s=ramp_s)),
        ]
        self._last = [0.0] * NUM_STREAMS
        self.gaps: list[tuple[float, float]] = []  # (when, how long)
        self.states: list[tuple[float, str, int]] = []

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def submit(self, message: ToEngine) -> FromEngine | None:
        return self._engine.submit(message)

    def step(self) -> list[FromEngine]:
        if self._todo and self._clock() >= self._todo[0][0]:
            self._engine.submit(self._todo.pop(0)[1])
        messages = self._engine.step()
        now = self._clock()
        for message in messages:
            if isinstance(message, StepOutput) and message.ids:
                for id in np.frombuffer(message.ids, dtype=np.int64).tolist():
                    if id < NUM_STREAMS:
                        self.gaps.append((now, now - self._last[id]))
                        self._last[id] = now
        gate = self._engine.services.flow.input_gate
        held = sum(1 for _ in self._engine.scheduler.waiting_queue.blocked())
        self.states.append((now, gate.state, held))
        return messages

    def p99(self, since_s: float, until_s: float) -> float:
        return float(np.percentile([gap for at, gap in self.gaps if since_s < at <= until_s], 99))


def traffic() -> list[Arrival]:
    """Long streams; short requests as fast as they can be served, twice as fast while the input is
    blocked, and a few afterwards, so that it can recover."""
    streams = [Arrival(0.0, (Segment(key, 20),), 6_000, 6_000) for key in range(NUM_STREAMS)]
    found = list(streams)
    now = 1.0
    key = NUM_STREAMS
    while now < END_S:
        found.append(Arrival(now, (Segment(key, PROMPT),), OUTPUT, OUTPUT))
        key += 1
        rate = float(CAPACITY)
        if BLOCK_S <= now < UNBLOCK_S:
            rate = 2 * CAPACITY
        elif now >= UNBLOCK_S:
            rate = CAPACITY / 10
        now += 1 / rate
    return found


@functools.cache
def run(ramp_s: float) -> tuple[Blocked, Record]:
    made: list[Blocked] = []

    def around(engine: Engine, clock: Clock) -> Blocked:
        made.append(Blocked(engine, clock, ramp_s))
        return made[0]

    record = simulate(SETTINGS, STEP, traffic(), around=around)
    return made[0], record


def test_running_streams_do_not_notice_that_a_block_ends_with_a_ramp() -> None:
    blocked, _ = run(RAMP_S)
    before_s = blocked.p99(5.0, BLOCK_S)
    recovery_s = blocked.p99(UNBLOCK_S, UNBLOCK_S + RAMP_S)
    assert recovery_s <= 1.5 * before_s
    at_once, _ = run(0.0)
    assert at_once.p99(UNBLOCK_S, UNBLOCK_S + 30) > 10 * before_s


def test_the_requests_of_a_block_go_on_in_order_and_at_a_growing_rate() -> None:
    blocked, record = run(RAMP_S)
    came = (record.sent_s >= BLOCK_S + 1) & (record.sent_s < UNBLOCK_S + RAMP_S)
    first_s = record.first_s[came]
    assert len(first_s) > 200
    assert (np.diff(first_s) >= 0).all()
    quarters = [
        np.count_nonzero((first_s >= since) & (first_s < since + 45))
        for since in np.arange(UNBLOCK_S, UNBLOCK_S + RAMP_S, 45.0)
    ]
    assert quarters == sorted(quarters)
    assert quarters[0] < quarters[-1] / 3
    assert record.state.tolist() == [DONE] * len(record)
    states = [state for _, state, _ in blocked.states]
    changes = [state for before, state in pairwise(["", *states]) if state != before]
    assert changes == ["unblocked", "blocked", "ramping", "unblocked"]
    assert max(held for _, state, held in blocked.states if state == "ramping") > 200
    assert blocked.states[-1][2] == 0

"""Leaps change nothing: random traces under random settings give the same decisions, times and
state as step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from weft.engine.engine import Engine
from weft.scheduler.pace.step_cost import CostModel
from weft.scheduler.settings import SchedulerSettings
from weft.sim.cluster import simulate_cluster
from weft.sim.cost import CostRunner, TrueLengths, VirtualClock
from weft.sim.curve import StepCurve
from weft.sim.leap import EngineLeaps
from weft.sim.run import EngineTarget, Record, Run, fail
from weft.sim.speed import MachineSpeed, Stretch
from weft.sim.synthetic import Traffic, synthetic
from weft.sim.trace import EOS, Arrival, TokenSource

NUM_WORLDS = 12
NUM_BUSY = 6
MORE_WORLDS = 1_000  # slow
COLUMNS: tuple[str, ...] = ("sent_s", "first_s", "end_s", "prompt_len", "output_len", "cached_len")
COLUMNS += ("retractions", "state")


class World(NamedTuple):
    settings: SchedulerSettings
    arrivals: list[Arrival]
    cost: Any
    speed: MachineSpeed | None


def world(seed: int) -> World:
    """A random engine, a random trace, a random machine."""
    rng = np.random.default_rng(seed)

    def one(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    # Nothing is made at once in steps of limited length, with drafts, or beside a background.
    def often_else(usual: Any, seldom: Any) -> Any:
        return one(*[usual] * 9, seldom)

    settings = SchedulerSettings(
        num_pages=one(30, 80, 400),
        page_size=one(1, 4, 16),
        max_running_requests=one(1, 3, 8, 24),
        context_length=one(160, 600),
        vocab_size=500,
        eos_token_ids=(EOS,),
        chunked_prefill_size=one(-1, 16, 64),
        mixed_chunk=one(True, False),
        schedule_policy=one("fcfs", "lpm", "fair", "hrrn", "priority"),
        max_slowdown=one(-1.0, 1.2, 2.0),
        max_step_ms=often_else(0.0, 30.0),
        schedule_conservativeness=one(0.2, 1.0),
        aging_s=one(0.0, 0.5),
        speculative=often_else("off", "ngram"),
        prefix_cache=one(True, True, False),
        max_queue_s=one(0.0, 0.0, 2.0),
        max_run_s=one(0.0, 0.0, 3.0),
        max_queued_requests=one(4, 1_000),
    )
    traffic = Traffic(
        requests=int(rng.integers(4, 24)),
        arrivals=one("poisson", "burst"),
        rate=one(0.0, 0.5, 4.0, 40.0),
        input_len=one("uniform:1:60", "lognormal:30"),
        output_len=one("uniform:1:90", "lognormal:40", "1"),
        max_tokens=one(30, 200),
        prefixes=one(0, 3),
        prefix_len=20,
        turns=one(1, 3),
        think=one(0.0, 1.0),
        tenants=one(1, 3),
        traffic_seed=seed,
    )
    has_background = often_else(False, True)
    arrivals = []
    for arrival in synthetic(traffic):
        output = rng.integers(2, 400, arrival.output_len).astype(np.int32).tobytes()
        change = {
            "leaves_s": one(np.inf, np.inf, np.inf, 0.4),
            "timeout_ms": one(0, 0, 0, 900),
            "ignore_eos": one(False, False, True),
            "priority": int(rng.integers(3)),
            "background": has_background and one(False, False, True),
            "output": one(b"", output),
        }
        arrivals.append(arrival._replace(**change))
    cost = one(
        CostModel(0.01, 2e-4, 1e-6, 1e-5),
        StepCurve(step_s=0.004, knots=(1, 8), token_s=(1e-3, 2e-4), pair_s=1e-7),
    )
    slow = MachineSpeed([Stretch(0.0, 0.3, 0.3), Stretch(0.3, 0.9, 0.2)])
    return World(settings, arrivals, cost, one(None, slow))


class Outcome(NamedTuple):
    record: Record
    state: dict[str, Any]
    num_calls: int  # steps of the engine, one by one


def played(one: World, *, leaps: bool) -> Outcome:
    clock = VirtualClock()
    lengths = TrueLengths()
    runner = CostRunner(one.cost, clock, lengths, one.speed)
    engine = Engine(one.settings, runner, clock=clock, overlap=False, on_failure=fail)
    engine_leaps = EngineLeaps(engine, runner, clock, lengths) if leaps else None
    target = EngineTarget(engine, clock, engine_leaps)
    record = Run(target, TokenSource(one.settings.vocab_size), lengths).play(one.arrivals)
    scheduler = engine.scheduler
    columns = scheduler.kv.columns
    state = {
        "meter": vars(runner.meter),
        "now": clock.now,
        "counters": scheduler.counters.totals(),
        "steps": scheduler.planner.num_steps,
        "free": scheduler.kv.allocator._free.tolist(),
        "owners": scheduler.kv.allocator.last_owner.tolist(),
        "tokens": columns.tokens.tolist(),
        "ratio": scheduler.prefills.new_token_ratio.current,
        "walks": scheduler.history.num_walks,
        "totals": str(scheduler.history.clock.totals),
        "beside": (record.beside.num_output, record.beside.num_prompt),
        "results": engine.core.loop.num_results,
        "cost": scheduler.pace.model(),
        "gaps": [str(record.gaps.percentile(percent)) for percent in (1, 50, 90, 99, 100)],
    }
    return Outcome(record, state, engine.core.guard.num_turns)


def check(seed: int) -> None:
    one = world(seed)
    step_by_step = played(one, leaps=False)
    leaping = played(one, leaps=True)
    for name in COLUMNS:
        left, right = getattr(step_by_step.record, name), getattr(leaping.record, name)
        np.testing.assert_array_equal(left, right, err_msg=f"{name} of world {seed}")
    reasons = [one.record.reason for one in (step_by_step, leaping)]
    assert reasons[0].indices.tolist() == reasons[1].indices.tolist()
    assert leaping.state == step_by_step.state


@pytest.mark.parametrize("seed", range(NUM_WORLDS))
def test_a_random_world_is_the_same_with_leaps_bit_for_bit(seed: int) -> None:
    check(seed)


def cluster_figures(seed: int, *, leaps: bool) -> list[Any]:
    one = world(seed)
    # After the first background request nothing is made at once.
    arrivals = [arrival._replace(background=False) for arrival in one.arrivals]
    return figures(one.settings, one.cost, arrivals, leaps=leaps)


def figures(
    settings: SchedulerSettings, cost: Any, arrivals: list[Arrival], *, leaps: bool
) -> list[Any]:
    """What became of the requests, and what three engines did."""
    record = simulate_cluster(
        settings,
        cost,
        arrivals,
        num_replicas=3,
        method="cache_aware",
        overlap=False,
        leaps=leaps,
    )
    columns = [getattr(record, name).tolist() for name in COLUMNS]
    gaps = [record.gaps.percentile(percent) for percent in (1, 50, 99, 100)]
    return [str(columns), str(gaps), record.machine.busiest, vars(record.machine.meter)]


@pytest.mark.parametrize("seed", range(NUM_WORLDS))
def test_several_engines_do_the_same_with_leaps(seed: int) -> None:
    assert cluster_figures(seed, leaps=True) == cluster_figures(seed, leaps=False)


def busy_cluster(seed: int, *, leaps: bool) -> list[Any]:
    """Three engines that decode uniformly most of the time; chats come, and clients leave, in the
    midst of that."""
    rng = np.random.default_rng(seed)
    settings = SchedulerSettings(
        num_pages=2_000,
        page_size=4,
        max_running_requests=24,
        context_length=600,
        vocab_size=500,
        eos_token_ids=(EOS,),
    )
    traffic = Traffic(
        requests=30,
        rate=8.0,
        input_len="uniform:1:60",
        output_len="uniform:20:90",
        max_tokens=200,
        turns=1 + seed % 3,
        think=0.3,
        traffic_seed=seed,
    )
    arrivals = []
    for arrival in synthetic(traffic):
        leaves_s = float(rng.choice([np.inf, np.inf, np.inf, 0.2]))
        timeout_ms = int(rng.choice([0, 0, 0, 700]))
        arrivals.append(arrival._replace(leaves_s=leaves_s, timeout_ms=timeout_ms))
    return figures(settings, CostModel(0.01, 2e-4, 1e-6, 1e-5), arrivals, leaps=leaps)


@pytest.mark.parametrize("seed", range(NUM_BUSY))
def test_several_busy_engines_do_the_same_with_leaps(seed: int) -> None:
    assert busy_cluster(seed, leaps=True) == busy_cluster(seed, leaps=False)


@pytest.mark.slow
def test_a_thousand_random_worlds_are_the_same_with_leaps() -> None:
    for seed in range(NUM_WORLDS, MORE_WORLDS):
        check(seed)
        assert cluster_figures(seed, leaps=True) == cluster_figures(seed, leaps=False)


def test_a_long_output_takes_few_steps_of_the_engine() -> None:
    one = world(0)
    settings = replace(
        one.settings,
        num_pages=1_000,
        page_size=16,
        context_length=2_000,
        max_step_ms=0.0,
        max_run_s=0.0,
        speculative="off",
        chunked_prefill_size=-1,
        max_slowdown=-1.0,
    )
    alone = Arrival(0.0, b"\5\0\0\0" * 10, output_len=1_000, max_new_tokens=1_200)
    long = one._replace(settings=settings, arrivals=[alone])
    assert played(long, leaps=False).num_calls >= 1_000
    assert played(long, leaps=True).num_calls <= 6

"""`weft bench batching`: static against continuous batching.
The same engine, the same requests, another policy.

Static batching lets no request join a batch that decodes: all wait for its slowest request. What
continuous batching gains is a product, and the report shows its factors:

    tokens/s = rows in a decode step / seconds of a decode step
               * share of the time that is spent decoding

More rows do work, but a step with more rows takes longer, and new requests' prompts interrupt the
decoding. With the same requests, the rows in a step cannot grow by more than max / mean of the
output lengths of a batch, on any device.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from weft.bench.results import write_json
from weft.bench.testbed import Testbed
from weft.config.engine import EngineConfig
from weft.config.options import Settings, option
from weft.scheduler.pace.step_cost import CostModel
from weft.scheduler.settings import SchedulerSettings
from weft.sim.cost import read_cost
from weft.sim.run import Record, simulate
from weft.sim.synthetic import at_once
from weft.sim.table import number, table
from weft.sim.trace import EOS, VOCAB_SIZE

STATIC = "static"
CONTINUOUS = "fcfs"
INPUT_LEN = 64
SHORTEST = 100  # output tokens
LONGEST = 1_000

Draw = Callable[[random.Random], float]

# How mixed outputs are spread between the two:
# evenly, or as in chats, where most answers are short and few are long.
MIXES: dict[str, Draw] = {
    "uniform": lambda rng: rng.uniform(SHORTEST, LONGEST),
    "lognormal": lambda rng: rng.lognormvariate(math.log(150), 0.8),
}


@dataclass(frozen=True, kw_only=True)
class BatchingOptions:
    simulate: bool = option(
        False, "in virtual time, with the cost model", group="bench", everyday=True
    )
    cost: str = option("gpu", "of the simulation, as for weft sim", group="bench", everyday=True)
    mix: str = option(
        "uniform",
        "how mixed outputs are spread between 100 and 1000",
        group="bench",
        everyday=True,
        choices=tuple(MIXES),
    )
    scale: float = option(
        1.0,
        "outputs so many times as long as 100 to 1000",
        group="bench",
        everyday=True,
        low=0.01,
        high=10,
    )
    json: str = option("", "file for the figures as JSON", group="bench", everyday=True)


class BatchingWorkload(NamedTuple):
    """Requests that come at once. `num_rows` of them can run together."""

    name: str
    num_rows: int
    lengths: tuple[tuple[int, int], ...]  # tokens of input and output of each
    goal: float  # tokens/s of continuous batching, in those of static


class BatchingRun(NamedTuple):
    """One run of a workload."""

    output_per_s: float  # tokens
    row_use: float  # share of the rows that decode steps use, in the mean over their time
    rows_per_step: float  # in the mean over decode steps
    decode_step_s: float
    decode_share: float  # of the whole time

    @classmethod
    def of(cls, record: Record) -> BatchingRun:
        meter = record.meter
        return cls(
            output_per_s=int(record.output_len.sum()) / record.total_s,
            row_use=meter.mean_rows / record.num_rows,
            rows_per_step=meter.num_decode_rows / meter.num_decodes,
            decode_step_s=meter.decode_s / meter.num_decodes,
            decode_share=meter.decode_s / record.total_s,
        )


class BatchingComparison(NamedTuple):
    workload: BatchingWorkload
    static: BatchingRun
    continuous: BatchingRun

    @property
    def ratio(self) -> float:
        return self.continuous.output_per_s / self.static.output_per_s

    @property
    def is_met(self) -> bool:
        return self.ratio >= self.workload.goal

    @property
    def why(self) -> str:
        """Where the ratio comes from."""
        rows = self.continuous.rows_per_step / self.static.rows_per_step
        step = self.continuous.decode_step_s / self.static.decode_step_s
        share = self.continuous.decode_share / self.static.decode_share
        text = (
            f"{rows:.2f} x the rows in a step / {step:.2f} x its time "
            f"* {share:.2f} x the time spent decoding"
        )
        if self.is_met:
            return text
        if rows < self.workload.goal:
            return (
                f"{text}; static batching leaves too few rows idle: "
                f"at equal times of a step it were {rows:.2f} x"
            )
        return f"{text}; steps with more rows take too much longer here"


def bench_batching(settings: Settings) -> int:
    options = settings.make(BatchingOptions)
    config = settings.make(EngineConfig)
    wanted = workloads(options.mix, options.scale)
    if options.simulate:
        summary = f"simulated, --cost {options.cost}"
        cost = read_cost(options.cost)
        comparisons = compare(wanted, partial(_simulated, config=config, cost=cost))
    else:
        testbed = Testbed.of(config)
        summary = testbed.summary
        comparisons = compare(wanted, partial(_measured, config=config, testbed=testbed))
    print(summary)
    print(_table(comparisons))
    for each in comparisons:
        print(f"{each.workload.name}: {each.why}")
    facts = {"engine": summary, "mix": options.mix, "scale": options.scale}
    write_json(options.json, "batching", facts, [_figures(each) for each in comparisons])
    return 0


def workloads(mix: str = "uniform", scale: float = 1.0, seed: int = 0) -> list[BatchingWorkload]:
    """The three workloads. `mix` is a name of MIXES;
    `scale` makes all outputs shorter, for slow machines.
    """
    rng = random.Random(seed)

    def lengths(num: int, draw: Draw) -> tuple[tuple[int, int], ...]:
        pairs: list[tuple[int, int]] = []
        for _ in range(num):
            output = min(max(draw(rng), SHORTEST), LONGEST)
            pairs.append((INPUT_LEN, max(2, round(output * scale))))
        return tuple(pairs)

    return [
        BatchingWorkload("uniform lengths", 16, lengths(192, _middle), 1.5),
        BatchingWorkload("mixed lengths", 16, lengths(192, MIXES[mix]), 3.0),
        BatchingWorkload("high concurrency", 64, lengths(768, MIXES[mix]), 2.5),
    ]


def _middle(rng: random.Random) -> float:
    return (SHORTEST + LONGEST) / 2


def compare(
    wanted: Sequence[BatchingWorkload], run: Callable[[BatchingWorkload, str], BatchingRun]
) -> list[BatchingComparison]:
    """Run each workload under both policies. `run` plays a workload under a schedule policy."""
    comparisons = []
    for workload in wanted:
        static = run(workload, STATIC)
        continuous = run(workload, CONTINUOUS)
        comparisons.append(BatchingComparison(workload, static, continuous))
    return comparisons


def _mixes(config: EngineConfig, policy: str) -> bool:
    """A static batch that decoded before it is complete would stay incomplete."""
    return config.mixed_chunk and policy != STATIC


def _simulated(
    workload: BatchingWorkload, policy: str, *, config: EngineConfig, cost: CostModel
) -> BatchingRun:
    """In virtual time, with memory for all rows."""
    longest = max(map(sum, workload.lengths))
    settings = SchedulerSettings(
        num_pages=(longest // 16 + 2) * workload.num_rows,
        page_size=16,
        max_running_requests=workload.num_rows,
        context_length=longest,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        schedule_policy=policy,
        chunked_prefill_size=2_048,
        mixed_chunk=_mixes(config, policy),
        aging_s=0.0,
    )
    return BatchingRun.of(simulate(settings, cost, at_once(workload.lengths)))


def _measured(
    workload: BatchingWorkload, policy: str, *, config: EngineConfig, testbed: Testbed
) -> BatchingRun:
    """On a loaded model."""
    record = testbed.play(
        at_once(workload.lengths, first_key=testbed.new_key),
        schedule_policy=policy,
        max_running_requests=min(workload.num_rows, testbed.settings.max_running_requests),
        mixed_chunk=_mixes(config, policy),
    )
    return BatchingRun.of(record)


def _table(comparisons: Sequence[BatchingComparison]) -> str:
    header = [
        "",
        "static tok/s",
        "continuous",
        "ratio",
        "goal",
        "",
        "rows used, static",
        "continuous",
    ]
    rows = []
    for each in comparisons:
        verdict = "missed"
        if each.is_met:
            verdict = "met"
        row = [
            each.workload.name,
            number(each.static.output_per_s),
            number(each.continuous.output_per_s),
            f"{each.ratio:.2f} x",
            f"{each.workload.goal:g} x",
            verdict,
            f"{each.static.row_use:.0%}",
            f"{each.continuous.row_use:.0%}",
        ]
        rows.append(row)
    return table(header, rows)


def _figures(comparison: BatchingComparison) -> dict[str, Any]:
    return {
        "scene": comparison.workload.name,
        "ratio": comparison.ratio,
        "goal": comparison.workload.goal,
        "why": comparison.why,
        "static": comparison.static._asdict(),
        "continuous": comparison.continuous._asdict(),
    }

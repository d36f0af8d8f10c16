"""`python -m benchmarks.batching`: static against continuous batching, with the same engine and requests.

Static batching (`static_batches.py`) collects a batch, computes it as a rectangle until its slowest
request ends, and then begins the next batch. The gain of continuous batching is a product, and the
report shows its factors:

    tokens/s = rows with a request in a decode step / seconds of a decode step
               * share of the time that is spent decoding

With equal rows, continuous batching cannot gain more than max / mean of the output lengths of a
batch, on any device.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from benchmarks.static_batches import StaticBatches
from weft.bench.results import write_json
from weft.bench.testbed import Testbed
from weft.cli.bench import run_command
from weft.config.engine import EngineConfig
from weft.config.options import Command, Settings, SettingsError, option
from weft.engine.engine import Engine
from weft.json_types import JsonObject
from weft.scheduler.pace.step_cost import CostModel
from weft.scheduler.settings import SchedulerSettings
from weft.sim.cost import read_cost
from weft.sim.report import e2e_of, percentiles, ttft_of
from weft.sim.run import Around, Clock, Record, SteppableEngine, simulate
from weft.sim.synthetic import at_once, gaps_s
from weft.sim.table import number, table
from weft.sim.trace import EOS, VOCAB_SIZE, AnyPrompt, Arrival, Prompt, Segment

STATIC = "static"
CONTINUOUS = "continuous"
AT_ONCE = "at_once"
INPUT_LEN = 64
SHORTEST = 100  # output tokens
LONGEST = 1_000
PAGE_SIZE = 16  # tokens, in virtual time
SPARE_PAGES = 4  # most pages that admission reserves for a request besides its tokens

Draw = Callable[[random.Random], float]

# Distributions of mixed outputs between the two lengths: uniform, or as in chats, where most
# answers are short and few are long.
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
        "factor for the lengths of prompts (64) and outputs (100 to 1000)",
        group="bench",
        everyday=True,
        low=0.01,
        high=10,
    )
    batches: int = option(
        12,
        "full batches of requests in each run",
        group="bench",
        everyday=True,
        low=1,
        high=1_000,
    )
    arrivals: str = option(
        "poisson",
        "process of arrivals",
        group="bench",
        everyday=True,
        choices=(AT_ONCE, "poisson", "burst"),
    )
    load: float = option(
        1.2,
        "output tokens that are asked for in a second, in those that the engine makes with all "
        "rows in use",
        group="bench",
        everyday=True,
        low=0.01,
        high=100,
    )
    repeats: int = option(
        1,
        "runs of each, in turns; the one of median speed counts",
        group="bench",
        everyday=True,
        low=1,
        high=99,
    )
    json: str = option(
        "",
        "file for the figures as JSON",
        group="bench",
        everyday=True,
        judge="weft.config.outputs:wrong_file",
    )


class BatchingWorkload(NamedTuple):
    """Requests, of which `num_rows` can run at the same time."""

    name: str
    num_rows: int
    lengths: tuple[tuple[int, int], ...]  # (input tokens, output tokens) of each
    goal: float  # wanted ratio of the throughputs in tokens/s, continuous to static

    @property
    def mean_output_len(self) -> float:
        return sum(output for _, output in self.lengths) / len(self.lengths)


class BatchingRun(NamedTuple):
    """One run of a workload. Times in seconds."""

    output_per_s: float  # tokens, without padding
    row_use: float  # share of the rows of decode steps that computed a token of a request
    rows_per_step: float  # number of these rows, mean over decode steps
    decode_step_s: float
    decode_share: float  # share of the whole time
    ttft_p50_s: float
    e2e_p50_s: float
    e2e_p99_s: float

    @classmethod
    def of(cls, record: Record) -> BatchingRun:
        meter = record.machine.meter
        # The first token of each request comes from its prefill.
        num_decoded = int(record.output_len.sum()) - len(record)
        rows_per_step = num_decoded / meter.num_decodes
        e2e_p50_s, _, e2e_p99_s = percentiles(e2e_of(record))
        return cls(
            output_per_s=int(record.output_len.sum()) / record.total_s,
            row_use=rows_per_step / record.machine.num_rows,
            rows_per_step=rows_per_step,
            decode_step_s=meter.decode_s / meter.num_decodes,
            decode_share=meter.decode_s / record.total_s,
            ttft_p50_s=percentiles(ttft_of(record))[0],
            e2e_p50_s=e2e_p50_s,
            e2e_p99_s=e2e_p99_s,
        )


Play = Callable[[BatchingWorkload, Sequence[Arrival], str], Record]


class BatchingComparison(NamedTuple):
    workload: BatchingWorkload
    peak_per_s: float  # output tokens per second while all rows decode and nothing else runs
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
        """An explanation of the ratio."""
        rows = self.continuous.rows_per_step / self.static.rows_per_step
        step = self.continuous.decode_step_s / self.static.decode_step_s
        share = self.continuous.decode_share / self.static.decode_share
        text = (
            f"{rows:.2f} x the rows with a request in a step / {step:.2f} x its time "
            f"* {share:.2f} x the time spent decoding"
        )
        if self.is_met:
            return text
        most = 1 / self.static.row_use
        if most < self.workload.goal:
            return (
                f"{text}; static batching leaves too few rows idle: with none idle, "
                f"in steps of the same time, it would be {most:.2f} x"
            )
        if step > 1:
            return f"{text}; steps with more rows take too much longer here"
        return f"{text}; too few requests arrived to use all rows"


def bench_batching(settings: Settings) -> int:
    options = settings.make(BatchingOptions)
    config = settings.make(EngineConfig)
    wanted = workloads(options.mix, options.scale, options.batches)
    if options.simulate:
        summary = f"simulated, --cost {options.cost}"
        play = partial(_simulated, config=config, cost=read_cost(options.cost))
    else:
        testbed = Testbed.of(config)
        summary = testbed.summary
        play = partial(_measured, config=config, testbed=testbed)
    comparisons = [compare(workload, play, options) for workload in wanted]
    print(f"{summary}; arrivals {options.arrivals}, load {options.load:g}")
    print(_table(comparisons))
    print()
    print(_times_table(comparisons))
    print()
    for each in comparisons:
        print(f"{each.workload.name}: {each.why}")
    facts = {
        "engine": summary,
        "mix": options.mix,
        "scale": options.scale,
        "batches": options.batches,
        "arrivals": options.arrivals,
        "load": options.load,
    }
    write_json(options.json, "batching", facts, [_figures(each) for each in comparisons])
    return 0


def workloads(
    mix: str = "uniform", scale: float = 1.0, batches: int = 12, seed: int = 0
) -> list[BatchingWorkload]:
    """The three workloads. `mix` is a key of MIXES; `scale` below 1 shortens all prompts and
    outputs, for slow machines; each workload has the requests of `batches` full batches."""
    rng = random.Random(seed)

    def lengths(num: int, draw: Draw) -> tuple[tuple[int, int], ...]:
        pairs: list[tuple[int, int]] = []
        for _ in range(num):
            output = min(max(draw(rng), SHORTEST), LONGEST)
            pairs.append((max(2, round(INPUT_LEN * scale)), max(2, round(output * scale))))
        return tuple(pairs)

    return [
        BatchingWorkload("uniform lengths", 16, lengths(16 * batches, _middle), 1.5),
        BatchingWorkload("mixed lengths", 16, lengths(16 * batches, MIXES[mix]), 3.0),
        BatchingWorkload("high concurrency", 64, lengths(64 * batches, MIXES[mix]), 2.5),
    ]


def _middle(rng: random.Random) -> float:
    return (SHORTEST + LONGEST) / 2


def compare(workload: BatchingWorkload, play: Play, options: BatchingOptions) -> BatchingComparison:
    """Run a workload both ways. `play` runs arrivals as `STATIC` or `CONTINUOUS`."""
    peak_per_s = _peak_per_s(workload, play)
    runs: dict[str, list[BatchingRun]] = {STATIC: [], CONTINUOUS: []}
    arrivals = _arrivals(workload, options.arrivals, options.load * peak_per_s)
    for _ in range(options.repeats):
        for way, done in runs.items():
            done.append(BatchingRun.of(play(workload, arrivals, way)))
    static = _median_run(runs[STATIC])
    continuous = _median_run(runs[CONTINUOUS])
    return BatchingComparison(workload, peak_per_s, static, continuous)


def _median_run(runs: Sequence[BatchingRun]) -> BatchingRun:
    by_speed = sorted(runs, key=lambda run: run.output_per_s)
    return by_speed[len(by_speed) // 2]


def _peak_per_s(workload: BatchingWorkload, play: Play) -> float:
    """Output tokens per second while every row decodes for a request, and no prompt is computed."""
    input_len = workload.lengths[0][0]
    mean_len = round(workload.mean_output_len)
    full = at_once([(input_len, mean_len)] * workload.num_rows)
    play(workload, full, CONTINUOUS)  # the very first run is slower
    meter = play(workload, full, CONTINUOUS).machine.meter
    return meter.num_decode_rows / meter.decode_s


def _arrivals(workload: BatchingWorkload, process: str, tokens_per_s: float) -> list[Arrival]:
    """The requests of a workload, at a rate of `tokens_per_s` requested output tokens per
    second."""
    requests = at_once(workload.lengths)
    if process == AT_ONCE:
        return requests
    rate = tokens_per_s / workload.mean_output_len
    gaps = gaps_s(np.random.default_rng(0), process, rate, len(requests))
    times = np.cumsum(gaps).tolist()
    arrivals = []
    for request, time_s in zip(requests, times, strict=True):
        arrivals.append(request._replace(time_s=time_s))
    return arrivals


def _around(way: str, num_rows: int, num_requests: int) -> Around | None:
    if way == CONTINUOUS:
        return None

    def collect(engine: Engine, clock: Clock) -> SteppableEngine:
        return StaticBatches(engine, num_rows=num_rows, num_requests=num_requests)

    return collect


def _simulated(
    workload: BatchingWorkload,
    arrivals: Sequence[Arrival],
    way: str,
    *,
    config: EngineConfig,
    cost: CostModel,
) -> Record:
    """Run in virtual time, with memory for all rows."""
    longest = max(map(sum, workload.lengths))
    settings = SchedulerSettings(
        num_pages=(longest // PAGE_SIZE + SPARE_PAGES) * workload.num_rows,
        page_size=PAGE_SIZE,
        max_running_requests=workload.num_rows,
        context_length=longest,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        chunked_prefill_size=2_048,
        mixed_chunk=_mixes(config, way),
        aging_s=0.0,
    )
    around = _around(way, workload.num_rows, len(arrivals))
    return simulate(settings, cost, arrivals, around=around)


def _measured(
    workload: BatchingWorkload,
    arrivals: Sequence[Arrival],
    way: str,
    *,
    config: EngineConfig,
    testbed: Testbed,
) -> Record:
    """Run on a loaded model, without drafts, so that a row yields one token per step."""
    num_rows = min(workload.num_rows, testbed.settings.max_running_requests)
    page_size = testbed.settings.page_size
    longest = max(map(sum, workload.lengths))
    needed = num_rows * (longest + SPARE_PAGES * page_size)
    if needed > testbed.settings.num_pages * page_size:
        raise SettingsError(
            f"a static batch of {num_rows} requests with {longest:,} tokens needs "
            f"--kv-tokens {needed:,}; it is {testbed.settings.num_pages * page_size:,}"
        )
    first_key = testbed.new_key
    return testbed.play(
        [each._replace(prompt=_moved(each.prompt, first_key)) for each in arrivals],
        around=_around(way, num_rows, len(arrivals)),
        schedule_policy="fcfs",
        max_running_requests=num_rows,
        mixed_chunk=_mixes(config, way),
        speculative="off",
    )


def _moved(prompt: AnyPrompt, first_key: int) -> Prompt:
    """A prompt that shares no prefix with the prompts of other runs."""
    assert not isinstance(prompt, bytes)
    return tuple(Segment(first_key + segment.key, segment.length) for segment in prompt)


def _mixes(config: EngineConfig, way: str) -> bool:
    """Whether steps are mixed: a static batch computes all of its prompts before it decodes."""
    return config.mixed_chunk and way != STATIC


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
        "of peak, static",
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
            f"{each.static.output_per_s / each.peak_per_s:.0%}",
            f"{each.continuous.output_per_s / each.peak_per_s:.0%}",
        ]
        rows.append(row)
    return table(header, rows)


def _times_table(comparisons: Sequence[BatchingComparison]) -> str:
    header = ["seconds", "", "first token p50", "whole answer p50", "p99"]
    rows = []
    for each in comparisons:
        for way, run in ((STATIC, each.static), (CONTINUOUS, each.continuous)):
            times = (run.ttft_p50_s, run.e2e_p50_s, run.e2e_p99_s)
            rows.append([each.workload.name, way, *map(number, times)])
    return table(header, rows)


def _figures(comparison: BatchingComparison) -> JsonObject:
    return {
        "scene": comparison.workload.name,
        "ratio": comparison.ratio,
        "goal": comparison.workload.goal,
        "peak_per_s": comparison.peak_per_s,
        "why": comparison.why,
        "static": comparison.static._asdict(),
        "continuous": comparison.continuous._asdict(),
    }


def main(argv: Sequence[str]) -> int:
    """Returns the exit status. Raises SettingsError."""
    command = Command(
        "benchmarks.batching",
        "Static against continuous batching.",
        BatchingOptions,
        EngineConfig,
        positional="model",
    )
    return run_command(command, bench_batching, argv)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SettingsError as problem:
        sys.exit(f"error: {problem}")

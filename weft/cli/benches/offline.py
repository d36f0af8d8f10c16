"""A model's speed in this process."""

from __future__ import annotations

import resource
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.bench import offline
from weft.bench.workloads import WORKLOADS, Workload
from weft.cli.benches.report import write_json
from weft.cli.benches.testbed import Testbed
from weft.config.engine import EngineConfig
from weft.config.options import Settings, SettingsError, option
from weft.sim.measured import write_steps
from weft.sim.synthetic import at_once
from weft.sim.table import number, table
from weft.sim.trace import Arrival, Segment


@dataclass(frozen=True, kw_only=True)
class OfflineBench:
    streams: str = option("1,16", "how many requests at once", group="bench", everyday=True)
    input_len: int = option(128, "tokens of each prompt", group="bench", everyday=True, low=1)
    output_len: int = option(128, "tokens of each completion", group="bench", everyday=True, low=2)
    workload: str = option(
        "", "instead: w1 to w5 (weft bench lists them), several by commas, or all", group="bench"
    )
    repeats: int = option(
        3, "measured runs of each; one more goes before", group="bench", everyday=True, low=1
    )
    trace: str = option(
        "", "file for what each step had to do and took (CSV)", group="bench", everyday=True
    )
    json: str = option("", "file for the figures as JSON", group="bench", everyday=True)


def bench_offline(settings: Settings) -> int:
    options = settings.make(OfflineBench)
    if options.workload:
        return _bench_workloads(options, settings.make(EngineConfig))
    loads = [
        offline.Load(streams, options.input_len, options.output_len)
        for streams in _counts(options.streams)
    ]
    testbed = Testbed.of(settings.make(EngineConfig))

    def run(load: offline.Load) -> offline.Times:
        record = testbed.play(
            at_once(
                [(load.input_len, load.output_len)] * load.num_streams, first_key=testbed.new_key
            )
        )
        began = record.sent_s.min()
        return offline.Times(
            total_s=float(record.end_s.max() - began),
            ttft_s=float(np.median(record.first_s - record.sent_s)),
            itl_s=record.gaps.percentile(50),
        )

    speeds = offline.measure(loads, run, repeats=options.repeats)
    rows = [
        [
            str(speed.load.num_streams),
            *map(
                number,
                (speed.output_per_s, speed.slowest_per_s, speed.fastest_per_s, speed.total_per_s),
            ),
            *(number(1e3 * seconds) for seconds in (speed.ttft_s, speed.itl_s)),
        ]
        for speed in speeds
    ]
    print(f"{testbed.summary}, {options.input_len:,} tokens in and {options.output_len:,} out")
    print(
        table(
            ["streams", "output tok/s", "slowest", "fastest", "total tok/s", "TTFT ms", "ITL ms"],
            rows,
        )
    )
    if options.trace:
        write_steps(options.trace, testbed.steps)
    write_json(
        options.json,
        "offline",
        {"model": testbed.summary},
        [speed._asdict() | {"load": speed.load._asdict()} for speed in speeds],
    )
    return 0


def _bench_workloads(options: OfflineBench, config: EngineConfig) -> int:
    """Run each workload `repeats` times, in turns, so that a slow minute of the machine falls on all of them."""
    workloads = read_workloads(options.workload)
    testbed = Testbed.of(config)
    seconds: dict[str, list[float]] = {name: [] for name in workloads}
    for turn in range(options.repeats + 1):
        for name, workload in workloads.items():
            record = testbed.play(_arrivals(workload, testbed.new_key))
            if turn:  # the first warms up
                seconds[name].append(float(record.end_s.max() - record.sent_s.min()))
    results: list[dict[str, Any]] = []
    for name, workload in workloads.items():
        output = sum(job.output_len for job in workload.jobs)
        prompt = sum(job.prompt_len for job in workload.jobs)
        median = statistics.median(seconds[name])
        results.append(
            {
                "workload": name,
                "output_per_s": output / median,
                "total_per_s": (prompt + output) / median,
                "fastest_output_per_s": output / min(seconds[name]),
                "seconds": seconds[name],
            }
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_000
    print(f"{testbed.summary}; peak memory {peak:,.0f} MB")
    header = ["", "", "output tok/s", "fastest", "total tok/s"]
    figures = ("output_per_s", "fastest_output_per_s", "total_per_s")
    rows = [
        [r["workload"], workloads[r["workload"]].about, *(number(r[figure]) for figure in figures)]
        for r in results
    ]
    print(table(header, rows))
    write_json(
        options.json, "workloads", {"model": testbed.summary, "peak_memory_mb": peak}, results
    )
    return 0


def read_workloads(names: str) -> dict[str, Workload]:
    """Those of `w1,w3`, or all. Raises SettingsError."""
    wanted = list(WORKLOADS) if names == "all" else names.split(",")
    unknown = [name for name in wanted if name not in WORKLOADS]
    if unknown:
        raise SettingsError(
            f"there is no workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}"
        )
    return {name: WORKLOADS[name] for name in wanted}


def _arrivals(workload: Workload, first_key: int) -> list[Arrival]:
    return [
        Arrival(
            0.0,
            tuple(
                Segment(key, length)
                for key, length in ((first_key, job.shared_len), (first_key + 1 + i, job.own_len))
                if length
            ),
            job.output_len,
            job.output_len,
            ignore_eos=True,
        )
        for i, job in enumerate(workload.jobs)
    ]


def _counts(text: str) -> list[int]:
    """Read 1,16. Raises SettingsError."""
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise SettingsError(f"--streams is {text!r}; numbers like 1,16 are expected")
    return counts

"""`weft bench offline`: the speed of a model in this process, for one stream and for many, or on
fixed workloads.

It measures without server, network and tokenizer.
"""

from __future__ import annotations

import resource
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft.bench.results import write_json
from weft.bench.testbed import Testbed
from weft.bench.workloads import WORKLOADS, Workload
from weft.config.engine import EngineConfig
from weft.config.options import Settings, SettingsError, option
from weft.json_types import JsonObject
from weft.sim.fit import write_steps
from weft.sim.synthetic import at_once
from weft.sim.table import number, table
from weft.sim.trace import Arrival, Segment


@dataclass(frozen=True, kw_only=True)
class OfflineOptions:
    streams: str = option("1,16", "how many requests at once", group="bench", everyday=True)
    input_len: int = option(128, "tokens of each prompt", group="bench", everyday=True, low=1)
    output_len: int = option(128, "tokens of each completion", group="bench", everyday=True, low=2)
    workload: str = option(
        "", "instead: w1 to w5 (weft bench lists them), several by commas, or all", group="bench"
    )
    repeats: int = option(
        3,
        "measured runs of each, after one that is not measured",
        group="bench",
        everyday=True,
        low=1,
    )
    trace: str = option(
        "",
        "file for the work and the time of each step (CSV)",
        group="bench",
        everyday=True,
        judge="weft.config.outputs:wrong_file",
    )
    json: str = option(
        "",
        "file for the figures as JSON",
        group="bench",
        everyday=True,
        judge="weft.config.outputs:wrong_file",
    )


class StreamLoad(NamedTuple):
    """`num_streams` requests that arrive at once, each with its own prompt, with exactly these
    lengths."""

    num_streams: int
    input_len: int
    output_len: int


class StreamTimes(NamedTuple):
    """The times of one run of a load, in seconds."""

    total_s: float  # until the last token
    ttft_s: float  # median over the streams
    itl_s: float  # median over all tokens but the first


class StreamSpeed(NamedTuple):
    """The medians of several runs of a load."""

    load: StreamLoad
    output_per_s: float  # output tokens per second, over the whole run
    total_per_s: float  # prompt and output tokens per second
    ttft_s: float
    itl_s: float
    slowest_per_s: float  # of the runs, in output tokens per second
    fastest_per_s: float


def bench_offline(settings: Settings) -> int:
    options = settings.make(OfflineOptions)
    config = settings.make(EngineConfig)
    if options.workload:
        return _bench_workloads(options, config)
    loads = []
    for num in _counts(options.streams):
        load = StreamLoad(num, options.input_len, options.output_len)
        loads.append(load)
    testbed = Testbed.of(config)
    speeds = measure(loads, lambda load: _play(testbed, load), repeats=options.repeats)
    print(f"{testbed.summary}, {options.input_len:,} tokens in and {options.output_len:,} out")
    print(_speed_table(speeds))
    if options.trace:
        write_steps(options.trace, testbed.steps)
    results = []
    for speed in speeds:
        result = speed._asdict()
        result["load"] = speed.load._asdict()
        results.append(result)
    write_json(options.json, "offline", {"model": testbed.summary}, results)
    return 0


def measure(
    loads: Sequence[StreamLoad], run: Callable[[StreamLoad], StreamTimes], *, repeats: int
) -> list[StreamSpeed]:
    """Run each load once to warm up, and then `repeats` times."""
    speeds = []
    for load in loads:
        run(load)
        times = [run(load) for _ in range(repeats)]
        speeds.append(_speed(load, times))
    return speeds


def read_workloads(names: str) -> dict[str, Workload]:
    """The workloads `w1,w3`, or all. Raises SettingsError."""
    if names == "all":
        return dict(WORKLOADS)
    wanted = {}
    for name in names.split(","):
        if name not in WORKLOADS:
            raise SettingsError(f"there is no workload {name!r}; there are {', '.join(WORKLOADS)}")
        wanted[name] = WORKLOADS[name]
    return wanted


def _counts(text: str) -> list[int]:
    """Read 1,16. Raises SettingsError."""
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise SettingsError(f"--streams is {text!r}; numbers like 1,16 are expected")
    return counts


def _play(testbed: Testbed, load: StreamLoad) -> StreamTimes:
    lengths = [(load.input_len, load.output_len)] * load.num_streams
    arrivals = at_once(lengths, first_key=testbed.new_key)
    record = testbed.play(arrivals)
    ttft_s = record.first_s - record.sent_s
    return StreamTimes(
        total_s=record.total_s,
        ttft_s=float(np.median(ttft_s)),
        itl_s=record.gaps.percentile(50),
    )


def _speed(load: StreamLoad, times: Sequence[StreamTimes]) -> StreamSpeed:
    output = load.num_streams * load.output_len
    speeds = sorted(output / each.total_s for each in times)
    median = statistics.median(speeds)
    total_len = load.input_len + load.output_len
    return StreamSpeed(
        load=load,
        output_per_s=median,
        total_per_s=median * total_len / load.output_len,
        ttft_s=statistics.median(each.ttft_s for each in times),
        itl_s=statistics.median(each.itl_s for each in times),
        slowest_per_s=speeds[0],
        fastest_per_s=speeds[-1],
    )


def _speed_table(speeds: Sequence[StreamSpeed]) -> str:
    header = ["streams", "output tok/s", "slowest", "fastest", "total tok/s", "TTFT ms", "ITL ms"]
    rows = []
    for speed in speeds:
        row = [
            str(speed.load.num_streams),
            number(speed.output_per_s),
            number(speed.slowest_per_s),
            number(speed.fastest_per_s),
            number(speed.total_per_s),
            number(1e3 * speed.ttft_s),
            number(1e3 * speed.itl_s),
        ]
        rows.append(row)
    return table(header, rows)


# Fixed workloads


def _bench_workloads(options: OfflineOptions, config: EngineConfig) -> int:
    """Run each workload `repeats` times, in turns, so that a slow minute of the machine affects all
    of them."""
    workloads = read_workloads(options.workload)
    testbed = Testbed.of(config)
    seconds: dict[str, list[float]] = {name: [] for name in workloads}
    for round_index in range(options.repeats + 1):
        for name, workload in workloads.items():
            arrivals = _arrivals(workload, testbed.new_key)
            record = testbed.play(arrivals)
            if round_index:  # the first round warms up
                seconds[name].append(record.total_s)
    results = []
    for name, workload in workloads.items():
        result = _workload_figures(name, workload, seconds[name])
        results.append(result)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    peak = usage.ru_maxrss / 1_000  # Linux reports kB
    print(f"{testbed.summary}; peak memory {peak:,.0f} MB")
    print(_workload_table(workloads, results))
    facts = {"model": testbed.summary, "peak_memory_mb": peak}
    write_json(options.json, "workloads", facts, results)
    return 0


def _arrivals(workload: Workload, first_key: int) -> list[Arrival]:
    """All requests of a workload at once. Their shared prefix has the key `first_key`, the rest of
    each prompt its own key."""
    arrivals = []
    for own_key, request in enumerate(workload.requests, first_key + 1):
        prompt = []
        if request.shared_len:
            prompt.append(Segment(first_key, request.shared_len))
        if request.own_len:
            prompt.append(Segment(own_key, request.own_len))
        arrival = Arrival(
            time_s=0.0,
            prompt=tuple(prompt),
            output_len=request.output_len,
            max_new_tokens=request.output_len,
            ignore_eos=True,
        )
        arrivals.append(arrival)
    return arrivals


def _workload_figures(name: str, workload: Workload, seconds: list[float]) -> JsonObject:
    output = sum(request.output_len for request in workload.requests)
    prompt = sum(request.prompt_len for request in workload.requests)
    median = statistics.median(seconds)
    return {
        "workload": name,
        "output_per_s": output / median,
        "total_per_s": (prompt + output) / median,
        "fastest_output_per_s": output / min(seconds),
        "seconds": seconds,
    }


def _workload_table(workloads: dict[str, Workload], results: list[JsonObject]) -> str:
    header = ["", "", "output tok/s", "fastest", "total tok/s"]
    rows = []
    for result in results:
        row = [
            result["workload"],
            workloads[result["workload"]].about,
            number(result["output_per_s"]),
            number(result["fastest_output_per_s"]),
            number(result["total_per_s"]),
        ]
        rows.append(row)
    return table(header, rows)

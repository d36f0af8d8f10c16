"""The verb `bench`: finds what is to be measured, puts its parts together, prints a table and writes JSON.

weft bench scheduler | offline | serving | batching
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.bench import batching, offline, serving
from weft.bench.http import HttpError, Server
from weft.config.engine import EngineConfig
from weft.config.machine import probe
from weft.config.model import ModelConfig
from weft.config.options import Command, Config, Settings, SettingsError, asked_help, did_you_mean, option
from weft.config.resolve import resolve
from weft.executor.plan import Runner
from weft.executor.weights.fetch import local_folder
from weft.launch.checkpoint import check_files
from weft.launch.sim import VOCAB_SIZE, read_cost
from weft.scheduler.service.engine import Engine
from weft.scheduler.settings import SchedulerSettings
from weft.sim.fit import fit
from weft.sim.measured import MeasuredRunner, RealClock, StepTime, write_steps
from weft.sim.report import Slo, Summary, summarize
from weft.sim.run import REFUSED, Record, Run, simulate
from weft.sim.synthetic import Traffic, at_once, synthetic
from weft.sim.table import number, table
from weft.sim.trace import EOS, Arrival, TokenSource

MAX_KEYS = 100_000  # prompts of one run; those of another share no prefix with them

# What the cost model is fitted to: input and output lengths of requests that come at once. Few and many rows, short and
# long contexts, small and large prefills.
CALIBRATION: list[list[tuple[int, int]]] = [
    [(16, 64)],
    [(512, 32)],
    [(32, 48)] * 4,
    [(256, 48)] * 4,
    [(16 * i, 8 * i) for i in range(1, 17)],
    [(24 * i, 40) for i in range(1, 33)],
]


@dataclass(frozen=True, kw_only=True)
class SchedulerBench:
    steps: int = option(300, "decode steps to time", group="bench", everyday=True, low=1)
    sequences: int = option(100_000, "sequences in the prefix tree", group="bench", everyday=True, low=1_000)
    json: str = option("", "file for the figures as JSON", group="bench", everyday=True)


@dataclass(frozen=True, kw_only=True)
class OfflineBench:
    streams: str = option("1,16", "how many requests at once", group="bench", everyday=True)
    input_len: int = option(128, "tokens of each prompt", group="bench", everyday=True, low=1)
    output_len: int = option(128, "tokens of each completion", group="bench", everyday=True, low=2)
    repeats: int = option(3, "measured runs of each; one more goes before", group="bench", everyday=True, low=1)
    trace: str = option("", "file for what each step had to do and took (CSV)", group="bench", everyday=True)
    json: str = option("", "file for the figures as JSON", group="bench", everyday=True)


@dataclass(frozen=True, kw_only=True)
class ServingBench:
    url: str = option("http://127.0.0.1:8000", "server with an OpenAI API", group="bench", everyday=True)
    model: str = option("", "model to ask for; the server's first if not given", group="bench", everyday=True)
    requests: int = option(100, "how many", group="bench", everyday=True, low=1)
    rate: float = option(0.0, "requests a second (Poisson); 0: see --concurrency", group="bench", everyday=True, low=0)
    concurrency: int = option(16, "open requests at most; 0: any number", group="bench", everyday=True, low=0)
    input_len: int = option(128, "tokens of each prompt", group="bench", everyday=True, low=1)
    output_len: int = option(128, "tokens of each completion", group="bench", everyday=True, low=1)
    shared_len: int = option(0, "of the prompt, the same in all requests", group="bench", everyday=True, low=0)
    api_key: str = option("", "key of the server", group="bench", everyday=True)
    json: str = option("", "file for the figures as JSON", group="bench", everyday=True)


@dataclass(frozen=True, kw_only=True)
class BatchingBench:
    simulate: bool = option(False, "in virtual time, with the cost model", group="bench", everyday=True)
    cost: str = option("gpu", "of the simulation, as for weft sim", group="bench", everyday=True)
    mix: str = option(
        "uniform",
        "how mixed outputs are spread between 100 and 1000",
        group="bench",
        everyday=True,
        choices=tuple(batching.MIXES),
    )
    scale: float = option(
        1.0, "outputs so many times as long as 100 to 1000", group="bench", everyday=True, low=0.01, high=10
    )
    json: str = option("", "file for the figures as JSON", group="bench", everyday=True)


@dataclass(frozen=True, kw_only=True)
class PredictionBench:
    json: str = option("", "file for the figures as JSON", group="bench", everyday=True)
    trace: str = option("", "file for what each step of the run had to do and took (CSV)", group="bench", everyday=True)


def bench(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit status."""
    name = argv[0] if argv else ""
    if name in ("", "-h", "--help"):
        print(_help())
        return 0
    if name not in BENCHES:
        raise SettingsError(f"there is no benchmark {name!r}{did_you_mean(name, BENCHES)} (weft bench lists them)")
    run, about, configs, positional = BENCHES[name]
    command = Command(f"weft bench {name}", about, *configs, positional=positional)
    section = asked_help(argv[1:])
    if section is not None:
        print(command.help(section))
        return 0
    return run(command.read(argv[1:], os.environ))


def bench_scheduler(settings: Settings) -> int:
    from weft.sim.overhead import measure

    options = settings.make(SchedulerBench)
    figures = measure(steps=options.steps, sequences=options.sequences)
    rows = [
        [
            figure.name,
            number(figure.median),
            f"{number(figure.p5)}-{number(figure.p95)}",
            figure.unit,
            number(figure.goal),
            "met" if figure.is_met else "missed",
            figure.others,
        ]
        for figure in figures
    ]
    print(table(["", "median", "p5-p95", "", "goal", "", "others"], rows))
    print("* without taking in the result of the step")
    write_json(options.json, "scheduler", {}, [figure._asdict() | {"is_met": figure.is_met} for figure in figures])
    return 0


class Testbed:
    """A loaded model, and an engine of its own for each run over it: nothing is cached, nothing has been counted."""

    def __init__(self, runner: Runner, settings: SchedulerSettings, *, overlap: bool, summary: str) -> None:
        self.settings = settings
        self.overlap = overlap
        self.summary = summary
        self.steps: list[StepTime] = []  # of all runs
        self._runner = runner
        self._keys = itertools.count(step=MAX_KEYS)

    @classmethod
    def of(cls, config: EngineConfig) -> Testbed:
        """Load a model. With random weights (--load-format dummy) a folder with a config.json will do."""
        from weft.launch.build import build_engine

        folder = local_folder(config.model, config.revision)
        if config.load_format != "dummy":
            check_files(folder)
        model = ModelConfig.from_folder(folder, Path(config.model).name)
        resolved = resolve(config, model, probe()).config
        built = build_engine(resolved, folder)
        settings = built.engine.scheduler.settings
        return cls(built.runner, settings, overlap=resolved.overlap, summary=built.ready.model_summary)

    @property
    def new_key(self) -> int:
        """First key for a trace whose prompts share nothing with those of earlier ones."""
        return next(self._keys)

    def play(self, arrivals: Iterable[Arrival], **changed: Any) -> Record:
        """Run a trace in real time, with some of the scheduler's settings changed."""
        settings, clock = replace(self.settings, **changed), RealClock()
        runner = MeasuredRunner(self._runner)
        engine = Engine(settings, runner, clock=clock, overlap=self.overlap, on_failure=_fail)
        record = Run(engine, clock, TokenSource(settings.vocab_size)).play(arrivals)
        if (record.state == REFUSED).any():
            longest = int((record.prompt_len + record.output_len).max())
            raise SettingsError(
                f"requests were refused: prompt and completion together may have {engine.scheduler.max_len:,} tokens "
                f"here (--context-length, --kv-tokens); a prompt has {longest:,}"
            )
        record.meter, record.num_rows = runner.meter, settings.max_running_requests
        self.steps += runner.steps
        return record


def _fail(exc: Exception) -> None:
    raise exc


def bench_offline(settings: Settings) -> int:
    options = settings.make(OfflineBench)
    loads = [offline.Load(streams, options.input_len, options.output_len) for streams in _counts(options.streams)]
    testbed = Testbed.of(settings.make(EngineConfig))

    def run(load: offline.Load) -> offline.Times:
        record = testbed.play(
            at_once([(load.input_len, load.output_len)] * load.num_streams, first_key=testbed.new_key)
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
            *map(number, (speed.output_per_s, speed.slowest_per_s, speed.fastest_per_s, speed.total_per_s)),
            *(number(1e3 * seconds) for seconds in (speed.ttft_s, speed.itl_s)),
        ]
        for speed in speeds
    ]
    print(f"{testbed.summary}, {options.input_len:,} tokens in and {options.output_len:,} out")
    print(table(["streams", "output tok/s", "slowest", "fastest", "total tok/s", "TTFT ms", "ITL ms"], rows))
    if options.trace:
        write_steps(options.trace, testbed.steps)
    write_json(
        options.json,
        "offline",
        {"model": testbed.summary},
        [speed._asdict() | {"load": speed.load._asdict()} for speed in speeds],
    )
    return 0


def bench_serving(settings: Settings) -> int:
    options = settings.make(ServingBench)
    load = serving.Load(
        num_requests=options.requests,
        input_len=options.input_len,
        output_len=options.output_len,
        rate=options.rate,
        concurrency=options.concurrency,
        shared_len=min(options.shared_len, options.input_len),
        model=options.model,
    )
    try:
        outcome = asyncio.run(serving.run(Server(options.url, options.api_key), load))
    except HttpError as exc:
        raise SettingsError(str(exc)) from exc
    answered = outcome.answered
    failed = [call for call in outcome.calls if call.error]
    if failed:
        print(f"{len(failed)} of {len(outcome.calls)} requests failed, the first with: {failed[0].error}")
    if not answered:
        return 1
    times = {
        "TTFT ms": [call.ttft_s for call in answered],
        "ITL ms": [gap for call in answered for gap in call.itl_s],
        "E2E ms": [call.e2e_s for call in answered],
    }
    percentiles = {name: _percentiles(values) for name, values in times.items()}
    print(f"{len(answered):,} requests in {outcome.total_s:.1f} s: {number(outcome.requests_per_s)} a second")
    print(f"{number(outcome.output_per_s)} output tokens a second")
    print(table(["", "p50", "p90", "p99"], [[name, *map(number, row)] for name, row in percentiles.items()]))
    results = {
        "requests_per_s": outcome.requests_per_s,
        "output_per_s": outcome.output_per_s,
        "total_s": outcome.total_s,
        "num_failed": len(failed),
        "percentiles": {name: dict(zip(("p50", "p90", "p99"), row, strict=True)) for name, row in percentiles.items()},
    }
    write_json(options.json, "serving", asdict(load), results)
    return 1 if failed else 0


def bench_batching(settings: Settings) -> int:
    options, config = settings.make(BatchingBench), settings.make(EngineConfig)
    scenes = batching.scenes(options.mix, options.scale)

    def mixes(policy: str) -> bool:
        """A static batch that decoded before it is complete would stay incomplete."""
        return config.mixed_chunk and policy != batching.STATIC

    if options.simulate:
        cost, summary = read_cost(options.cost), f"simulated, --cost {options.cost}"

        def play(scene: batching.Scene, policy: str) -> Record:
            return simulate(_simulated(scene, policy, mixed_chunk=mixes(policy)), cost, at_once(scene.lengths))
    else:
        testbed = Testbed.of(config)
        summary = testbed.summary

        def play(scene: batching.Scene, policy: str) -> Record:
            num_rows = min(scene.num_rows, testbed.settings.max_running_requests)
            arrivals = at_once(scene.lengths, first_key=testbed.new_key)
            return testbed.play(arrivals, policy=policy, max_running_requests=num_rows, mixed_chunk=mixes(policy))

    comparisons = batching.compare(scenes, lambda scene, policy: _trial(play(scene, policy)))
    rows = [
        [
            each.scene.name,
            *map(number, (each.static.output_per_s, each.continuous.output_per_s)),
            f"{each.ratio:.2f} x",
            f"{each.scene.goal:g} x",
            "met" if each.is_met else "missed",
            f"{each.static.row_use:.0%}",
            f"{each.continuous.row_use:.0%}",
        ]
        for each in comparisons
    ]
    header = ["", "static tok/s", "continuous", "ratio", "goal", "", "rows used, static", "continuous"]
    print(summary)
    print(table(header, rows))
    print(*(f"{each.scene.name}: {each.why}" for each in comparisons), sep="\n")
    results = [
        {
            "scene": each.scene.name,
            "ratio": each.ratio,
            "goal": each.scene.goal,
            "why": each.why,
            "static": each.static._asdict(),
            "continuous": each.continuous._asdict(),
        }
        for each in comparisons
    ]
    write_json(options.json, "batching", {"engine": summary, "mix": options.mix, "scale": options.scale}, results)
    return 0


def _simulated(scene: batching.Scene, policy: str, *, mixed_chunk: bool) -> SchedulerSettings:
    """Settings with memory for all rows of a scene."""
    longest = max(map(sum, scene.lengths))
    return SchedulerSettings(
        num_pages=(longest // 16 + 2) * scene.num_rows,
        page_size=16,
        max_running_requests=scene.num_rows,
        context_length=longest,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        policy=policy,
        chunked_prefill_size=2_048,
        mixed_chunk=mixed_chunk,
    )


def _trial(record: Record) -> batching.Trial:
    meter, total_s = record.meter, float(record.end_s.max() - record.sent_s.min())
    return batching.Trial(
        output_per_s=int(record.output_len.sum()) / total_s,
        row_use=meter.mean_rows / record.num_rows,
        rows_per_step=meter.num_decode_rows / meter.num_decodes,
        decode_step_s=meter.decode_s / meter.num_decodes,
        decode_share=meter.decode_s / total_s,
    )


def bench_prediction(settings: Settings) -> int:
    """Fit the cost model to this model on this machine, simulate a trace, and run the same trace.

    Two predictions: with the cost that was fitted before the run, which is what a user has; and with the cost fitted to
    the run's own steps, which shows what is left of the error when the machine does not change its speed in between.
    """
    options, traffic = settings.make(PredictionBench), settings.make(Traffic)
    testbed = Testbed.of(settings.make(EngineConfig))
    before = fit(_calibrate(testbed))
    arrivals = [
        arrival._replace(max_new_tokens=arrival.output_len, ignore_eos=True)  # so long a real model talks, too
        for arrival in synthetic(traffic, first_key=testbed.new_key)
    ]
    measured = summarize(testbed.play(arrivals), Slo())
    own = fit(testbed.steps)
    if options.trace:
        write_steps(options.trace, testbed.steps)
    guesses = [
        summarize(simulate(testbed.settings, each.cost, arrivals, overlap=testbed.overlap), Slo())
        for each in (before, own)
    ]
    rows = []
    results = []
    for name, truth, first, second in zip(FIGURES, *map(_figures, (measured, *guesses)), strict=True):
        errors = [f"{guess / truth - 1:+.1%}" for guess in (first, second)]
        rows.append([name, number(truth), number(first), errors[0], number(second), errors[1]])
        results.append({"figure": name, "measured": truth, "predicted": first, "predicted_with_own_cost": second})
    for name, each in (("calibration", before), ("run", own)):
        cost = ",".join(f"{value:.4g}" for value in each.cost)
        print(f"{name}: --cost {cost}, {each.num_steps:,} steps, half of them met to {each.median_error:.0%}")
    print(f"{testbed.summary}; the device was busy {measured.device_use:.0%} of the run")
    print(table(["", "measured", "predicted", "error", "with the run's own cost", "error"], rows))
    facts = {"model": testbed.summary, "cost": before.cost._asdict(), "own_cost": own.cost._asdict()}
    write_json(options.json, "prediction", facts | {"traffic": asdict(traffic)}, results)
    return 0


FIGURES = [
    "output tokens/s",
    "requests/s",
    *(f"{name} {percent}, ms" for name in ("TTFT", "ITL", "E2E") for percent in ("p50", "p90", "p99")),
]


def _figures(summary: Summary) -> list[float]:
    """The values of FIGURES."""
    seconds = [*summary.ttft_s, *summary.itl_s, *summary.e2e_s]
    return [summary.output_per_s, summary.requests_per_s, *(1e3 * value for value in seconds)]


def _calibrate(testbed: Testbed) -> list[StepTime]:
    """Steps of all kinds, measured. Each load runs twice: the first time is slower."""
    for _ in range(2):
        testbed.steps = []
        for load in CALIBRATION:
            testbed.play(at_once(load, first_key=testbed.new_key))
    measured, testbed.steps = testbed.steps, []
    return measured


BENCHES: dict[str, tuple[Callable[[Settings], int], str, tuple[type[Config], ...], str]] = {
    "scheduler": (bench_scheduler, "What the scheduler costs a step, without a model.", (SchedulerBench,), ""),
    "offline": (bench_offline, "A model's speed in this process, by streams.", (OfflineBench, EngineConfig), "model"),
    "serving": (bench_serving, "A running server, over HTTP.", (ServingBench,), "url"),
    "batching": (
        bench_batching,
        "Static against continuous batching.",
        (BatchingBench, EngineConfig),
        "model",
    ),
    "prediction": (
        bench_prediction,
        "How well weft sim predicts a real run of a model on this machine.",
        (PredictionBench, Traffic, EngineConfig),
        "model",
    ),
}


def write_json(name: str, kind: str, settings: dict[str, Any], results: object) -> None:
    """Write results with what is needed to compare them to others, if a file is wanted."""
    if not name:
        return
    machine = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
    }
    document = {"bench": kind, "time": time.time(), "machine": machine, "settings": settings, "results": results}
    try:
        with open(name, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
    except OSError as exc:
        raise SettingsError(f"cannot write {name}: {exc.strerror}") from exc
    print(f"written to {name}", file=sys.stderr)


def _percentiles(seconds: list[float]) -> list[float]:
    """p50, p90 and p99 in milliseconds."""
    percentiles: list[float] = (1e3 * np.percentile(seconds, (50, 90, 99))).tolist() if seconds else [math.nan] * 3
    return percentiles


def _counts(text: str) -> list[int]:
    """Read 1,16. Raises SettingsError."""
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise SettingsError(f"--streams is {text!r}; numbers like 1,16 are expected")
    return counts


def _help() -> str:
    lines = [f"  {name:10} {about}" for name, (_, about, _, _) in BENCHES.items()]
    return "\n".join(["usage: weft bench WHAT [options]", "", *lines, "", "weft bench WHAT --help tells more."])

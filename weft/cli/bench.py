"""The verb `bench`: parses the command line and calls a benchmark of `weft/bench/`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from weft.bench.freeze import FreezeOptions, bench_freeze
from weft.bench.offline import OfflineOptions, bench_offline
from weft.bench.prediction import PredictionOptions, bench_prediction
from weft.bench.quality import QualityOptions, bench_quality
from weft.bench.roofline import RooflineOptions, bench_roofline
from weft.bench.scheduler import SchedulerBenchOptions, bench_scheduler
from weft.bench.serving import ServingOptions, bench_serving
from weft.bench.workloads import WORKLOADS
from weft.config.engine import EngineConfig
from weft.config.options import Command, Config, Settings, SettingsError, asked_help, did_you_mean
from weft.sim.synthetic import Traffic


class Benchmark(NamedTuple):
    run: Callable[[Settings], int]
    about: str
    configs: tuple[type[Config], ...]  # classes whose fields are the options
    positional: str = ""  # the option that needs no flag


BENCHES = {
    "scheduler": Benchmark(
        bench_scheduler,
        "What the scheduler costs a step, without a model.",
        (SchedulerBenchOptions,),
    ),
    "offline": Benchmark(
        bench_offline,
        "A model's speed in this process, by streams.",
        (OfflineOptions, EngineConfig),
        positional="model",
    ),
    "serving": Benchmark(
        bench_serving,
        "A running server, over HTTP.",
        (ServingOptions,),
        positional="url",
    ),
    "roofline": Benchmark(
        bench_roofline,
        "How much of bandwidth and compute decode and prefill use, by the size of the batch.",
        (RooflineOptions, EngineConfig),
        positional="model",
    ),
    "freeze": Benchmark(
        bench_freeze,
        "How long streams stand still while prompts are computed.",
        (FreezeOptions, EngineConfig),
        positional="model",
    ),
    "quality": Benchmark(
        bench_quality,
        "What fewer bits cost: perplexity, divergence, same likeliest tokens.",
        (QualityOptions, EngineConfig),
        positional="model",
    ),
    "prediction": Benchmark(
        bench_prediction,
        "How well weft sim predicts a real run of a model on this machine.",
        (PredictionOptions, Traffic, EngineConfig),
        positional="model",
    ),
}


def bench(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit status."""
    name = ""
    if argv:
        name = argv[0]
    if name in ("", "-h", "--help"):
        print(_help())
        return 0
    if name not in BENCHES:
        raise SettingsError(
            f"there is no benchmark {name!r}{did_you_mean(name, BENCHES)} (weft bench lists them)"
        )
    benchmark = BENCHES[name]
    command = Command(
        f"weft bench {name}",
        benchmark.about,
        *benchmark.configs,
        positional=benchmark.positional,
    )
    return run_command(command, benchmark.run, argv[1:])


def run_command(command: Command, run: Callable[[Settings], int], argv: Sequence[str]) -> int:
    """Run a benchmark with the settings that `argv` and the environment say, or show its help.
    Returns the exit status. Raises SettingsError."""
    section = asked_help(argv)
    if section is not None:
        print(command.help(section))
        return 0
    return run(command.read(argv, os.environ))


def _help() -> str:
    benches = [f"  {name:10} {benchmark.about}" for name, benchmark in BENCHES.items()]
    loads = [f"  {name:10} {workload.about}" for name, workload in WORKLOADS.items()]
    lines = [
        "usage: weft bench WHAT [options]",
        "",
        *benches,
        "",
        "workloads:",
        *loads,
        "",
        "weft bench WHAT --help tells more.",
    ]
    return "\n".join(lines)

"""The verb `bench`: finds what is to be measured. What there is stands in `benches/`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from weft.bench.workloads import WORKLOADS
from weft.cli.benches.batching import BatchingBench, bench_batching
from weft.cli.benches.freeze import FreezeBench, bench_freeze
from weft.cli.benches.grammar import GrammarBench, bench_grammar
from weft.cli.benches.offline import OfflineBench, bench_offline
from weft.cli.benches.prediction import PredictionBench, bench_prediction
from weft.cli.benches.scheduler import SchedulerBench, bench_scheduler
from weft.cli.benches.serving import ServingBench, bench_serving
from weft.cli.benches.shape import ShapeBench, bench_shape
from weft.config.engine import EngineConfig
from weft.config.options import Command, Config, Settings, SettingsError, asked_help, did_you_mean
from weft.sim.synthetic import Traffic


def bench(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit status."""
    name = argv[0] if argv else ""
    if name in ("", "-h", "--help"):
        print(_help())
        return 0
    if name not in BENCHES:
        raise SettingsError(
            f"there is no benchmark {name!r}{did_you_mean(name, BENCHES)} (weft bench lists them)"
        )
    run, about, configs, positional = BENCHES[name]
    command = Command(f"weft bench {name}", about, *configs, positional=positional)
    section = asked_help(argv[1:])
    if section is not None:
        print(command.help(section))
        return 0
    return run(command.read(argv[1:], os.environ))


BENCHES: dict[str, tuple[Callable[[Settings], int], str, tuple[type[Config], ...], str]] = {
    "scheduler": (
        bench_scheduler,
        "What the scheduler costs a step, without a model.",
        (SchedulerBench,),
        "",
    ),
    "offline": (
        bench_offline,
        "A model's speed in this process, by streams.",
        (OfflineBench, EngineConfig),
        "model",
    ),
    "serving": (bench_serving, "A running server, over HTTP.", (ServingBench,), "url"),
    "batching": (
        bench_batching,
        "Static against continuous batching.",
        (BatchingBench, EngineConfig),
        "model",
    ),
    "freeze": (
        bench_freeze,
        "How long streams stand still while prompts are computed.",
        (FreezeBench, EngineConfig),
        "model",
    ),
    "grammar": (
        bench_grammar,
        "What structured output costs: free, under masks, with jumps.",
        (GrammarBench, EngineConfig),
        "model",
    ),
    "shape": (
        bench_shape,
        "Write a model of random weights to compare engines on.",
        (ShapeBench,),
        "shape",
    ),
    "prediction": (
        bench_prediction,
        "How well weft sim predicts a real run of a model on this machine.",
        (PredictionBench, Traffic, EngineConfig),
        "model",
    ),
}


def _help() -> str:
    lines = [f"  {name:10} {about}" for name, (_, about, _, _) in BENCHES.items()]
    loads = [f"  {name:10} {workload.about}" for name, workload in WORKLOADS.items()]
    more = "weft bench WHAT --help tells more."
    return "\n".join(
        ["usage: weft bench WHAT [options]", "", *lines, "", "workloads:", *loads, "", more]
    )

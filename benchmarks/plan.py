"""How well `weft plan` predicts settings that were never run, and how good its choice is: a real sweep of 24 settings.

    weft plan MODEL --think-s 4 --json plan.json
    python benchmarks/plan.py plan.json --think-s 4 --keep FOLDER --first 0 --last 9     # and so on up to 25
    python benchmarks/plan.py plan.json --keep FOLDER

Each setting serves the same requests, at the level of the plan's knee, for about --seconds, and is predicted for the same requests; the
plan's own settings come first. Without --last the results of earlier runs are compared. The options of the load are those of the plan.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.capacity.machine import MeasuredMachine
from weft.cli.capacity.confirm import predict, real_arrivals, real_run
from weft.cli.capacity.options import WorkloadOptions
from weft.cli.capacity.plan import read_machine, workload_of
from weft.config.options import Command
from weft.sim.report import Summary
from weft.sim.synthetic import Lengths
from weft.sim.table import table

SWEEP = {
    "max_slowdown": (1.15, 2.0, -1.0),
    "chunked_prefill_size": (128, 512),
    "max_running_requests": (4, 16),
    "schedule_policy": ("fcfs", "lpm"),
}
LEAST = 1e-3
FIGURES = ("tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "goodput")


def sweep(chosen: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of the plan, and all combinations."""
    names = list(SWEEP)
    return [
        chosen,
        *(dict(zip(names, values, strict=True)) for values in itertools.product(*SWEEP.values())),
    ]


def figures(summary: Summary) -> list[float]:
    return [
        summary.output_per_s,
        summary.ttft_s[0],
        summary.ttft_s[2],
        summary.itl_s[0],
        summary.good_per_s,
    ]


def play(asked: argparse.Namespace, plan: dict[str, Any], wanted: WorkloadOptions) -> None:
    """Run some of the settings, and keep what was measured and what was predicted."""
    machine: MeasuredMachine = read_machine(asked.plan)
    lengths = Lengths.parse(wanted.prompt, "--prompt"), Lengths.parse(wanted.output, "--output")
    workload = workload_of(wanted, lengths, machine, None)
    point = plan["knee_point"]
    arrivals = real_arrivals(workload, point["level"], point["requests_per_s"], asked.seconds)
    slo = wanted.wanted.slo
    settings = sweep(plan["candidates"][0]["changes"])
    for number in range(asked.first, min(asked.last, len(settings))):
        changes = settings[number]
        real = figures(real_run(machine, changes, arrivals, slo))
        said = figures(predict(machine, replace(machine.settings, **changes), arrivals, slo))
        found = {"changes": changes, "real": real, "said": said}
        (Path(asked.keep) / f"{number:02}.json").write_text(json.dumps(found))
        print(
            changes,
            *(
                f"{name} {was:.4g} ({now:.4g})"
                for name, was, now in zip(FIGURES, real, said, strict=True)
            ),
            flush=True,
        )


def compare(keep: Path) -> None:
    found = [json.loads(file.read_text()) for file in sorted(keep.glob("[0-9][0-9].json"))]
    # Without any good request, there is no error of goodput.
    errors = np.array([np.array(one["said"]) / np.maximum(one["real"], LEAST) - 1 for one in found])
    rows = []
    for index, name in enumerate(FIGURES):
        own = np.abs(errors[:, index])
        rows.append(
            [
                name,
                f"{np.median(own):.1%}",
                f"{np.percentile(own, 90):.1%}",
                f"{own.max():.1%}",
                f"{np.median(errors[:, index]):+.1%}",
            ]
        )
    print(
        table(
            [f"errors of {len(found)} predictions", "median", "p90", "largest", "median, signed"],
            rows,
        )
    )
    goodput = [one["real"][4] for one in found]
    print(
        f"goodput of the chosen settings {goodput[0]:.3g}/s, of the best {max(goodput):.3g}/s: {goodput[0] / max(*goodput, LEAST):.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Predictions of weft plan beside real runs.")
    parser.add_argument("plan", help="what weft plan --json has written")
    parser.add_argument("--keep", required=True, help="folder for the results")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=0)
    asked, load = parser.parse_known_args()
    wanted = Command("plan", "", WorkloadOptions).read(load, {}).make(WorkloadOptions)
    Path(asked.keep).mkdir(exist_ok=True)
    if asked.last:
        play(asked, json.loads(Path(asked.plan).read_text()), wanted)
    else:
        compare(Path(asked.keep))


if __name__ == "__main__":
    main()

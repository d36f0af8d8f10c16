"""How well `weft plan` predicts settings that were never run, and how good its choice is: a real sweep of 24 settings.

    weft plan MODEL --think-s 4 --json plan.json
    python benchmarks/plan.py plan.json --think-s 4 --keep FOLDER --first 0 --last 9     # and so on up to 25
    python benchmarks/plan.py plan.json --think-s 4 --keep FOLDER

Each setting serves the same requests, at the level of the plan's knee, for about --seconds; the plan's own settings come first. Without
--last they are predicted, and compared with what was measured. The options of the load are those of the plan.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.capacity.machine import MeasuredMachine
from weft.cli.capacity.confirm import predict, real_arrivals, real_run
from weft.cli.capacity.measure import journal_of
from weft.cli.capacity.options import WorkloadOptions
from weft.cli.capacity.plan import read_machine, workload_of
from weft.config.options import Command
from weft.sim.report import Summary
from weft.sim.synthetic import Lengths
from weft.sim.table import table
from weft.sim.trace import Arrival

SWEEP = {
    "max_slowdown": (1.15, 2.0, -1.0),
    "chunked_prefill_size": (128, 512),
    "max_running_requests": (4, 16),
    "schedule_policy": ("fcfs", "lpm"),
}
STRIDE = 7  # has no divisor in common with their number: the first ones differ in all of it
LEAST = 1e-3
FIGURES = ("tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "goodput")


class Planned:
    """A plan, and the requests of its knee."""

    def __init__(self, file: str, wanted: WorkloadOptions, seconds: float) -> None:
        plan = json.loads(Path(file).read_text())
        self.machine: MeasuredMachine = read_machine(file)
        lengths = Lengths.parse(wanted.prompt, "--prompt"), Lengths.parse(wanted.output, "--output")
        workload = workload_of(wanted, lengths, self.machine, None, [])
        point = plan["knee_point"]
        self.arrivals: Sequence[Arrival] = real_arrivals(
            workload, point["level"], point["requests_per_s"], seconds
        )
        self.slo = wanted.wanted.slo
        self.settings = sweep(plan["candidates"][0]["changes"])


def sweep(chosen: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of the plan, and all combinations."""
    names = list(SWEEP)
    found = [dict(zip(names, values, strict=True)) for values in itertools.product(*SWEEP.values())]
    return [chosen, *(found[STRIDE * number % len(found)] for number in range(len(found)))]


def figures(summary: Summary) -> list[float]:
    return [
        summary.output_per_s,
        summary.ttft_s[0],
        summary.ttft_s[2],
        summary.itl_s[0],
        summary.good_per_s,
    ]


def play(planned: Planned, keep: Path, first: int, last: int) -> None:
    """Run some of the settings, and keep what was measured."""
    for number in range(first, min(last, len(planned.settings))):
        changes = planned.settings[number]
        began = time.monotonic()
        journal = keep / f"{number:02}.journal"
        real = figures(real_run(planned.machine, changes, planned.arrivals, planned.slo, journal))
        (keep / f"{number:02}.json").write_text(json.dumps({"changes": changes, "real": real}))
        print(f"{changes}: {time.monotonic() - began:.1f} s", flush=True)


def compare(planned: Planned, keep: Path) -> None:
    """Print what was measured and predicted; then the same for a machine as fast as it was in each run, so that only the errors
    of the plan are left, without the changes of the machine from one minute to the next."""
    found = [json.loads(file.read_text()) for file in sorted(keep.glob("[0-9][0-9].json"))]
    speeds = [
        speed_of(planned.machine, keep / f"{number:02}.journal") for number in range(len(found))
    ]
    print(
        f"speed of the machine in the runs, of that when it was measured: {', '.join(f'{one:.2f}' for one in speeds)}\n"
    )
    predictions(planned, found, [1.0] * len(found))
    print("\nat the speed of each run")
    predictions(planned, found, speeds)
    goodput = [one["real"][4] for one in found]
    print(
        f"goodput of the chosen settings {goodput[0]:.3g}/s, of the best {max(goodput):.3g}/s: {goodput[0] / max(*goodput, LEAST):.3f}"
    )


def speed_of(machine: MeasuredMachine, journal: Path) -> float:
    """How fast the machine ran the steps of a journal, of the speed that it was measured at."""
    usual_s = 0.0
    took_s = 0.0
    for stretch in journal_of(journal).stretches(machine.curve):
        usual_s += stretch.usual_s
        took_s += stretch.ended_s - stretch.began_s
    return usual_s / took_s


def predictions(planned: Planned, found: Sequence[dict[str, Any]], speeds: Sequence[float]) -> None:
    rows = []
    errors = []
    for one, speed in zip(found, speeds, strict=True):
        settings = replace(planned.machine.settings, **one["changes"])
        said = figures(predict(planned.machine, settings, planned.arrivals, planned.slo, speed))
        real = one["real"]
        # Without any good request, there is no error of goodput.
        errors.append(np.array(said) / np.maximum(real, LEAST) - 1)
        name = " ".join(f"{value}" for value in one["changes"].values()) or "no change"
        pairs = zip(real, said, errors[-1], strict=True)
        rows.append([name, *(f"{was:.3g} ({now:.3g}, {error:+.0%})" for was, now, error in pairs)])
    print(table([f"measured (predicted), {len(planned.arrivals)} requests", *FIGURES], rows))
    rows = []
    for index, name in enumerate(FIGURES):
        signed = np.array(errors)[:, index]
        own = np.abs(signed)
        rows.append(
            [
                name,
                f"{np.median(own):.1%}",
                f"{np.percentile(own, 90):.1%}",
                f"{own.max():.1%}",
                f"{np.median(signed):+.1%}",
            ]
        )
    print()
    print(
        table(
            [f"errors of {len(found)} predictions", "median", "p90", "largest", "median, signed"],
            rows,
        )
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
    planned = Planned(asked.plan, wanted, asked.seconds)
    keep = Path(asked.keep)
    keep.mkdir(exist_ok=True)
    if asked.last:
        play(planned, keep, asked.first, asked.last)
    else:
        compare(planned, keep)


if __name__ == "__main__":
    main()

"""What the scheduler costs a step, without a model."""

from __future__ import annotations

from dataclasses import dataclass

from weft.cli.benches.report import write_json
from weft.config.options import Settings, option
from weft.sim.table import number, table


@dataclass(frozen=True, kw_only=True)
class SchedulerBench:
    steps: int = option(300, "decode steps to time", group="bench", everyday=True, low=1)
    sequences: int = option(
        100_000, "sequences in the prefix tree", group="bench", everyday=True, low=1_000
    )
    json: str = option("", "file for the figures as JSON", group="bench", everyday=True)


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
    write_json(
        options.json,
        "scheduler",
        {},
        [figure._asdict() | {"is_met": figure.is_met} for figure in figures],
    )
    return 0

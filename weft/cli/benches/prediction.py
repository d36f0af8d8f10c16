"""How well weft sim predicts a real run of a model on this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from weft.cli.benches.report import write_json
from weft.cli.benches.testbed import Testbed
from weft.config.engine import EngineConfig
from weft.config.options import Settings, option
from weft.sim.fit import fit
from weft.sim.measured import StepTime, write_steps
from weft.sim.report import Slo, Summary, summarize
from weft.sim.run import simulate
from weft.sim.synthetic import Traffic, at_once, synthetic
from weft.sim.table import number, table

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
class PredictionBench:
    json: str = option("", "file for the figures as JSON", group="bench", everyday=True)
    trace: str = option(
        "",
        "file for what each step of the run had to do and took (CSV)",
        group="bench",
        everyday=True,
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
        arrival._replace(
            max_new_tokens=arrival.output_len, ignore_eos=True
        )  # so long a real model talks, too
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
    for name, truth, first, second in zip(
        FIGURES, *map(_figures, (measured, *guesses)), strict=True
    ):
        errors = [f"{guess / truth - 1:+.1%}" for guess in (first, second)]
        rows.append([name, number(truth), number(first), errors[0], number(second), errors[1]])
        results.append(
            {
                "figure": name,
                "measured": truth,
                "predicted": first,
                "predicted_with_own_cost": second,
            }
        )
    for name, each in (("calibration", before), ("run", own)):
        cost = ",".join(f"{value:.4g}" for value in each.cost)
        print(
            f"{name}: --cost {cost}, {each.num_steps:,} steps, half of them met to {each.median_error:.0%}"
        )
    print(f"{testbed.summary}; the device was busy {measured.device_use:.0%} of the run")
    print(table(["", "measured", "predicted", "error", "with the run's own cost", "error"], rows))
    facts = {
        "model": testbed.summary,
        "cost": before.cost._asdict(),
        "own_cost": own.cost._asdict(),
    }
    write_json(options.json, "prediction", facts | {"traffic": asdict(traffic)}, results)
    return 0


FIGURES = [
    "output tokens/s",
    "requests/s",
    *(
        f"{name} {percent}, ms"
        for name in ("TTFT", "ITL", "E2E")
        for percent in ("p50", "p90", "p99")
    ),
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

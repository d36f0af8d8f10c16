"""`weft bench prediction`: how well `weft sim` predicts a real run of a model on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from weft.bench.results import write_json
from weft.bench.testbed import Testbed
from weft.config.engine import EngineConfig
from weft.config.options import Settings, option
from weft.sim.fit import CostFit, StepTime, fit, write_steps
from weft.sim.report import Slo, Summary, summarize
from weft.sim.run import simulate
from weft.sim.synthetic import Traffic, at_once, require_requests, synthetic
from weft.sim.table import number, table
from weft.sim.trace import Arrival

# Loads for the fit of the cost model: (input, output) lengths of requests that arrive at once, with
# few and many rows, short and long contexts, small and large prefills.
CALIBRATION: list[list[tuple[int, int]]] = [
    [(16, 64)],
    [(512, 32)],
    [(32, 48)] * 4,
    [(256, 48)] * 4,
    [(16 * i, 8 * i) for i in range(1, 17)],
    [(24 * i, 40) for i in range(1, 33)],
]


@dataclass(frozen=True, kw_only=True)
class PredictionOptions:
    json: str = option(
        "",
        "file for the figures as JSON",
        group="bench",
        everyday=True,
        judge="weft.config.outputs:wrong_file",
    )
    trace: str = option(
        "",
        "file for the work and the time of each step of the run (CSV)",
        group="bench",
        everyday=True,
    )


class Prediction(NamedTuple):
    """One figure: measured, and predicted in two ways."""

    figure: str
    measured: float
    predicted: float  # with the cost fitted before the run
    predicted_with_own_cost: float  # with the cost fitted to the run's own steps

    @property
    def row(self) -> list[str]:
        error = self.predicted / self.measured - 1
        error_with_own_cost = self.predicted_with_own_cost / self.measured - 1
        return [
            self.figure,
            number(self.measured),
            number(self.predicted),
            f"{error:+.1%}",
            number(self.predicted_with_own_cost),
            f"{error_with_own_cost:+.1%}",
        ]


def bench_prediction(settings: Settings) -> int:
    """Fit the cost model to this model on this machine, simulate a trace, and run the same trace.

    There are two predictions. The one with the cost fitted before the run is what a user has. The
    one with the cost fitted to the run's own steps shows the error that remains without changes of
    the machine's speed in between.
    """
    options = settings.make(PredictionOptions)
    traffic = settings.make(Traffic)
    require_requests(traffic)
    config = settings.make(EngineConfig)
    testbed = Testbed.of(config)
    before = fit(_calibrate(testbed))
    arrivals = _arrivals(traffic, testbed.new_key)
    record = testbed.play(arrivals)
    measured = summarize(record, Slo())
    own = fit(testbed.steps)
    if options.trace:
        write_steps(options.trace, testbed.steps)
    predictions = _compare(
        measured,
        _predict(testbed, before, arrivals),
        _predict(testbed, own, arrivals),
    )
    _print_cost("calibration", before)
    _print_cost("run", own)
    print(f"{testbed.summary}; the device was busy {measured.device_use:.0%} of the run")
    header = ["", "measured", "predicted", "error", "with the run's own cost", "error"]
    print(table(header, [prediction.row for prediction in predictions]))
    facts = {
        "model": testbed.summary,
        "cost": before.cost._asdict(),
        "own_cost": own.cost._asdict(),
        "traffic": asdict(traffic),
    }
    results = [prediction._asdict() for prediction in predictions]
    write_json(options.json, "prediction", facts, results)
    return 0


def _calibrate(testbed: Testbed) -> list[StepTime]:
    """Measure steps of all kinds. Each load runs twice, because the first time is slower."""
    for _ in range(2):
        testbed.steps = []
        for load in CALIBRATION:
            arrivals = at_once(load, first_key=testbed.new_key)
            testbed.play(arrivals)
    measured = testbed.steps
    testbed.steps = []
    return measured


def _arrivals(traffic: Traffic, first_key: int) -> list[Arrival]:
    """The trace. A real model would not end its outputs at the lengths of the trace, so each output
    runs to its length."""
    arrivals = []
    for arrival in synthetic(traffic, first_key=first_key):
        exact = arrival._replace(max_new_tokens=arrival.output_len, ignore_eos=True)
        arrivals.append(exact)
    return arrivals


def _predict(testbed: Testbed, fitted: CostFit, arrivals: Sequence[Arrival]) -> Summary:
    record = simulate(testbed.settings, fitted.cost, arrivals, overlap=testbed.overlap)
    return summarize(record, Slo())


def _compare(measured: Summary, predicted: Summary, with_own_cost: Summary) -> list[Prediction]:
    truth = _figures(measured)
    first = _figures(predicted)
    second = _figures(with_own_cost)
    predictions = []
    for name in truth:
        prediction = Prediction(
            figure=name,
            measured=truth[name],
            predicted=first[name],
            predicted_with_own_cost=second[name],
        )
        predictions.append(prediction)
    return predictions


def _figures(summary: Summary) -> dict[str, float]:
    figures = {
        "output tokens/s": summary.output_per_s,
        "requests/s": summary.requests_per_s,
    }
    times = {"TTFT": summary.ttft_s, "ITL": summary.itl_s, "E2E": summary.e2e_s}
    for name, seconds in times.items():
        for percent, value in zip(("p50", "p90", "p99"), seconds, strict=True):
            figures[f"{name} {percent}, ms"] = 1e3 * value
    return figures


def _print_cost(name: str, fitted: CostFit) -> None:
    steps = f"{fitted.num_steps:,} steps, half of them met to {fitted.median_error:.0%}"
    print(f"{name}: --cost {fitted.text}, {steps}")

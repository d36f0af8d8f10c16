"""Real runs of the best settings: the same requests as in a simulation, at the knee."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from weft.bench.http import HttpClient, HttpError
from weft.bench.played import play
from weft.capacity.answer import CapacityAnswer
from weft.capacity.axes.axis import AxisValue
from weft.capacity.machine import MeasuredMachine
from weft.capacity.search import Candidate
from weft.capacity.trial import with_front
from weft.capacity.workload import LAST_ID, ChatUsers, LeveledLoad
from weft.cli.capacity.served import measured_server, words_of
from weft.config.options import SettingsError
from weft.scheduler.settings import SchedulerSettings
from weft.sim.report import Slo, Summary, summarize
from weft.sim.run import simulate
from weft.sim.table import number
from weft.sim.trace import Arrival, TokenSource

LEAST_REQUESTS = 8


class Confirmation(NamedTuple):
    candidate: Candidate
    measured: Summary
    predicted: Summary  # of the same requests

    @property
    def line(self) -> str:
        changes = ", ".join(f"{name}={value}" for name, value in self.candidate.changes.items())
        pairs = [
            ("good/s", self.measured.good_per_s, self.predicted.good_per_s),
            ("tok/s", self.measured.output_per_s, self.predicted.output_per_s),
            ("TTFT p50 ms", 1e3 * self.measured.ttft_s[0], 1e3 * self.predicted.ttft_s[0]),
            ("ITL p50 ms", 1e3 * self.measured.itl_s[0], 1e3 * self.predicted.itl_s[0]),
        ]
        figures = [f"{name} {number(real)} ({number(said)})" for name, real, said in pairs]
        return f"real run   {changes or 'no change'}: {', '.join(figures)}"


def confirmed(
    found: CapacityAnswer, workload: LeveledLoad, seconds: float
) -> tuple[CapacityAnswer, list[str]]:
    """The answer with its candidates ranked by real runs, each of about `seconds`; and lines with
    what was measured, and in brackets what was predicted. Raises SettingsError."""
    point = found.knee_point
    arrivals = real_arrivals(workload, point.level, point.requests_per_s, seconds)
    runs = []
    for candidate in found.candidates:
        print(
            f"running {dict(candidate.changes) or 'without changes'}", file=sys.stderr, flush=True
        )
        with tempfile.TemporaryDirectory(prefix="weft-plan-") as folder:
            journal = Path(folder) / "confirmed.journal"
            measured = real_run(
                found.machine, candidate.changes, arrivals, found.wanted.slo, journal
            )
        predicted = predict(found.machine, candidate.settings, arrivals, found.wanted.slo)
        runs.append(Confirmation(candidate, measured, predicted))
    # The simulation's order stands among runs that are alike.
    best = max(run.measured.good_per_s for run in runs)
    least = ALIKE * best
    ranked = sorted(runs, key=lambda run: run.measured.good_per_s < least)
    candidates = [run.candidate for run in ranked]
    return found._replace(candidates=candidates), [run.line for run in ranked]


ALIKE = 0.97


def real_arrivals(
    workload: LeveledLoad, level: float, requests_per_s: float, seconds: float
) -> list[Arrival]:
    """Requests at this level, as many as take about this time; their prompts are token ids, and
    their outputs end at their lengths."""
    wanted = max(round(requests_per_s * seconds), LEAST_REQUESTS)
    if isinstance(workload, ChatUsers):
        arrivals = replace(workload, requests=max(wanted, round(level))).arrivals(level)
    else:
        arrivals = workload.arrivals(level)[:wanted]
    tokens = TokenSource(LAST_ID)
    exact = []
    for arrival in arrivals:
        change = arrival._replace(
            prompt=tokens.pack(arrival.prompt),
            max_new_tokens=arrival.output_len,
            ignore_eos=True,
            leaves_s=float("inf"),
            media=(),
        )
        exact.append(change)
    return exact


def predict(
    machine: MeasuredMachine,
    settings: SchedulerSettings,
    arrivals: Sequence[Arrival],
    slo: Slo,
    factor: float = 1.0,
) -> Summary:
    """The figures of these requests in virtual time, on the machine at `factor` times its speed."""
    record = simulate(
        settings,
        machine.curve,
        arrivals,
        overlap=machine.overlaps,
        speed=machine.speed(factor),
    )
    with_front(record, machine)
    return summarize(record, slo)


def real_run(
    machine: MeasuredMachine,
    changes: Mapping[str, AxisValue],
    arrivals: Sequence[Arrival],
    slo: Slo,
    journal: Path,
) -> Summary:
    """The figures of these requests on a server with these changes, which writes this journal.
    Raises SettingsError if it fails."""
    options = {**machine.options, **changes}
    words = [machine.model, *words_of(options)] if machine.model else words_of(options)
    with measured_server(words, journal) as server:
        try:
            played = asyncio.run(play(HttpClient(server.url), arrivals))
        except HttpError as exc:
            raise SettingsError(f"the server of a real run failed: {exc}") from exc
    return summarize(played.record, slo)

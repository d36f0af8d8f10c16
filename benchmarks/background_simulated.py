"""What `weft sim` says of chats beside a batch, with the cost of the steps that a server has recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from weft.batches.runner import WINDOW
from weft.bench.workloads import RequestShape
from weft.capacity.guesses import GuessModel, outcomes_for
from weft.capacity.machine import MeasuredMachine, measured_machine
from weft.journal.file import JournalReader
from weft.sim.journal import read_journal
from weft.sim.report import Slo, summarize
from weft.sim.run import simulate
from weft.sim.trace import Arrival, Segment

MOST_LINES = 1.5  # times as many as were answered, so that the batch does not end before the chats


class Chat(NamedTuple):
    sent_s: float  # since the first one
    shape: RequestShape


class PartLoad(NamedTuple):
    """What was asked in one part of a round, and what became of it."""

    chats: Sequence[Chat]
    lines: Sequence[RequestShape]
    before_s: float  # in which the batch was alone
    itl: tuple[float, float]  # measured: p50 and p99 of the times of all tokens, in milliseconds
    output_per_s: float  # of both
    seconds: float


class SimulatedFigures(NamedTuple):
    """Times are in milliseconds; NaN without chats."""

    itl_p50: float
    itl_p99: float
    ttft_mean: float
    output_per_s: float


def read(path: Path) -> MeasuredMachine:
    """The machine that a server's journal shows, with the guesses that were right in its texts."""
    with JournalReader(path) as reader:
        journal = read_journal(reader)
    return measured_machine(journal, name="", model="", options={})


def figures(machine: MeasuredMachine, load: PartLoad) -> SimulatedFigures:
    """The same part in virtual time."""
    lines = _lines(load, machine.guesses)
    arrivals = [*lines, *_chats(load, len(lines), machine.guesses)]
    record = simulate(machine.settings, machine.curve, arrivals, overlap=machine.overlaps)
    summary = summarize(record, Slo())
    if not load.chats:
        nothing = float("nan")
        return SimulatedFigures(nothing, nothing, nothing, summary.output_per_s)
    output_per_s = summary.output_per_s
    if summary.background is not None:
        output_per_s = summary.background.both_output_per_s
    is_chat = ~record.background
    waits_s = record.first_s[is_chat] - record.sent_s[is_chat]
    itl_s = summary.itl_s
    return SimulatedFigures(
        1e3 * itl_s[0], 1e3 * itl_s[2], 1e3 * float(waits_s.mean()), output_per_s
    )


def _needed(load: PartLoad) -> Sequence[RequestShape]:
    """The first lines of the batch: no more than can be answered."""
    if not load.lines:
        return ()
    mean_len = sum(line.output_len for line in load.lines) / len(load.lines)
    answered = load.output_per_s * (load.seconds + load.before_s) / mean_len
    most = MOST_LINES * answered if load.chats else answered
    return load.lines[: max(round(most), 1) + WINDOW]


def _lines(load: PartLoad, guesses: GuessModel | None) -> list[Arrival]:
    found = []
    for number, line in enumerate(_needed(load)):
        after = number - WINDOW
        arrival = _arrival(number, line, 0.0, guesses)
        found.append(arrival._replace(background=True, after=max(after, -1), tenant="background"))
    return found


def _chats(load: PartLoad, num_before: int, guesses: GuessModel | None) -> list[Arrival]:
    before_s = load.before_s if load.lines else 0.0
    return [
        _arrival(num_before + number, chat.shape, before_s + chat.sent_s, guesses)
        for number, chat in enumerate(load.chats)
    ]


def _arrival(key: int, shape: RequestShape, time_s: float, guesses: GuessModel | None) -> Arrival:
    outcomes = b""
    if guesses is not None:
        outcomes = outcomes_for(guesses, user=0, number=key, length=shape.output_len)
    return Arrival(
        time_s=time_s,
        prompt=(Segment(key, shape.own_len),),
        output_len=shape.output_len,
        max_new_tokens=shape.output_len,
        ignore_eos=True,
        guesses=outcomes,
    )

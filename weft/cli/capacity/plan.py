"""The verb `plan`: from a machine, or a journal, to settings and numbers of users.

weft plan MODEL --slo-ttft 1 --slo-itl 0.1
weft plan MODEL --users 20 --prompt 300 --output 150 --think-s 8
weft plan MODEL --compare quantize=none,int8
weft plan --trace traffic.journal --no-confirm
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from weft.capacity.answer import CapacityAnswer, Question, answer, to_dict
from weft.capacity.axes.table import AXES
from weft.capacity.machine import MeasuredMachine, measured_machine
from weft.capacity.workload import ChatUsers, LeveledLoad, RecordedTraffic
from weft.cli.capacity import show
from weft.cli.capacity.confirm import confirmed
from weft.cli.capacity.measure import OptionValue, journal_of, measure, processor
from weft.cli.capacity.options import PlanOptions, WorkloadOptions
from weft.cli.capacity.quality import stated_quality
from weft.cli.capacity.svg import write_svg
from weft.config.engine import EngineConfig
from weft.config.machine import usable_cores
from weft.config.options import (
    Command,
    Settings,
    SettingsError,
    asked_help,
    did_you_mean,
    options_by_name,
)
from weft.journal.file import MAGIC
from weft.sim.files import read_trace
from weft.sim.journal import Journal
from weft.sim.synthetic import Lengths
from weft.sim.trace import Arrival

ABOUT = (
    "How many users does this machine serve, and with which settings? Measures it, searches in "
    "virtual time, and confirms the best by real runs."
)
NOT_PASSED_ON = ("model", "journal")  # options that the measured server gets from elsewhere
MAX_TOKENS = 2_048  # of a request in a trace that does not say


class PlanFile(msgspec.Struct):
    """What `--cost` reads of an answer in JSON."""

    machine: MeasuredMachine


class Build(NamedTuple):
    """A server whose steps have a cost of their own. The name says how it differs from others."""

    name: str
    options: dict[str, OptionValue]


def plan(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit status."""
    command = Command(
        "weft plan", ABOUT, WorkloadOptions, PlanOptions, EngineConfig, positional="model"
    )
    section = asked_help(argv)
    if section is not None:
        print(command.help(section))
        return 0
    settings = command.read(argv, os.environ)
    found = planned(settings)
    written = settings.make(PlanOptions)
    if written.json == "-":
        print(json.dumps(_as_json(found)))
        return 0
    _print(found)
    if written.json:
        _write(written.json, json.dumps(_as_json(found), indent=1))
    if written.toml:
        _write(written.toml, show.toml(found[0].answer))
    if written.plot:
        write_svg(written.plot, found[0].answer)
    return 0


class Planned(NamedTuple):
    """The answer for one build, and lines about its real runs."""

    build: Build
    answer: CapacityAnswer
    confirmations: list[str]


def planned(settings: Settings) -> list[Planned]:
    """The answer for each build, the best first. Raises SettingsError."""
    options = settings.make(PlanOptions)
    wanted = settings.make(WorkloadOptions)
    prompt = Lengths.parse(wanted.prompt, "--prompt")
    output = Lengths.parse(wanted.output, "--output")
    lengths = prompt, output
    fixed = {
        name: value
        for name, value in settings.given(EngineConfig).items()
        if name not in NOT_PASSED_ON
    }
    journal = journal_in(wanted.trace)
    recorded = recorded_in(wanted, journal)
    builds = _builds(fixed, options.compare)
    if len(builds) > 1 and (options.cost or journal is not None):
        raise SettingsError(
            "--compare measures each server here: leave out --cost, and a journal as --trace"
        )
    model = settings.make(EngineConfig).model
    found = []
    for build in builds:
        users = users_of(wanted, lengths)
        machine = _machine(options, build, model, journal, users, len(builds))
        workload = workload_of(wanted, lengths, machine, journal, recorded)
        axes = [axis for axis in AXES if axis.name not in build.options]
        question = Question(
            workload=workload,
            wanted=wanted.wanted,
            axes=axes,
            wanted_level=float(wanted.users),
            num_machines=options.machines,
            price_per_hour=options.price_per_hour,
        )
        stop = SearchTime(options.search_s / len(builds))
        _say(f"searching{f' ({build.name})' if build.name else ''}")
        answered = answer(machine, question, stop, num_workers=usable_cores())
        check_served(answered)
        found.append(Planned(build, answered, []))
    found.sort(key=lambda one: (-one.answer.knee, -one.answer.knee_point.good_per_s))
    is_here = not options.cost and (journal is None or bool(model))
    if options.confirm and is_here:
        workload = workload_of(wanted, lengths, found[0].answer.machine, journal, recorded)
        confirmed_answer, lines = confirmed(found[0].answer, workload, options.confirm_s)
        found[0] = found[0]._replace(answer=confirmed_answer, confirmations=lines)
    return found


class SearchTime:
    """True once its time is over."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    def __call__(self) -> bool:
        return time.monotonic() > self._end_s


def _machine(
    options: PlanOptions,
    build: Build,
    model: str,
    journal: Journal | None,
    users: ChatUsers,
    num_builds: int,
) -> MeasuredMachine:
    """The machine, from a file, from the journal, or measured now. Raises SettingsError."""
    if options.cost:
        return with_options(read_machine(options.cost), build.options)
    if journal is not None:
        return with_options(machine_of(journal, model, {}), build.options)
    _say(f"measuring {model or 'the default model'} {build.name}".rstrip())
    return measure(model, build.options, seconds=options.measure_s / num_builds, users=users)


def with_options(machine: MeasuredMachine, options: Mapping[str, OptionValue]) -> MeasuredMachine:
    """The machine with these options of the scheduler; others were part of the measurement. Raises
    SettingsError if they cannot be."""
    changes = {name: value for name, value in options.items() if hasattr(machine.settings, name)}
    try:
        settings = replace(machine.settings, **cast(dict[str, Any], changes))
    except ValueError as exc:
        raise SettingsError(str(exc)) from exc
    return msgspec.structs.replace(
        machine, options={**machine.options, **options}, settings=settings
    )


def machine_of(journal: Journal, model: str, options: Mapping[str, OptionValue]) -> MeasuredMachine:
    """The machine that recorded a journal. Raises SettingsError if it computed nothing."""
    try:
        return measured_machine(journal, name=processor(), model=model, options=options)
    except ValueError as exc:
        raise SettingsError(f"--trace: nothing was computed in this journal: {exc}") from exc


def read_machine(name: str) -> MeasuredMachine:
    """Raises SettingsError if the file has no measured machine."""
    try:
        return msgspec.json.decode(Path(name).read_bytes(), type=PlanFile).machine
    except OSError as exc:
        raise SettingsError(f"--cost: cannot read {name}: {exc.strerror}") from exc
    except (msgspec.DecodeError, ValueError) as exc:
        raise SettingsError(
            f"--cost: {name} is no answer of weft plan --json with a machine: {exc}"
        ) from exc


def journal_in(name: str) -> Journal | None:
    """The journal in this file; None for another file. Raises SettingsError."""
    if not name:
        return None
    try:
        with open(name, "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                return None
    except OSError as exc:
        raise SettingsError(f"cannot read the trace {name}: {exc.strerror}") from exc
    journal = journal_of(Path(name))
    if not journal.arrivals:
        raise SettingsError(f"the journal {name} has no request that ended")
    return journal


def recorded_in(wanted: WorkloadOptions, journal: Journal | None) -> list[Arrival]:
    """The arrivals that a journal or a trace has recorded; none without one. Raises
    SettingsError."""
    arrivals: Iterator[Arrival] = iter(())
    if journal is not None:
        arrivals = iter(journal.arrivals)
    elif wanted.trace:
        arrivals = read_trace(wanted.trace, max_tokens=MAX_TOKENS)
    return list(islice(arrivals, wanted.requests or None))


def workload_of(
    wanted: WorkloadOptions,
    lengths: tuple[Lengths, Lengths],
    machine: MeasuredMachine,
    journal: Journal | None,
    recorded: list[Arrival],
) -> LeveledLoad:
    """What arrives."""
    context_length = machine.settings.context_length
    if journal is not None:
        return RecordedTraffic(recorded=recorded)
    if recorded:
        return RecordedTraffic(recorded=list(_fitting(recorded, context_length)))
    return replace(
        users_of(wanted, lengths),
        context_length=context_length,
        vocab_size=machine.settings.vocab_size,
        guesses=machine.guesses,
    )


def _fitting(arrivals: Iterable[Arrival], context_length: int) -> Iterator[Arrival]:
    """The arrivals of a trace that has no limits of outputs, with limits that fit the context."""
    for arrival in arrivals:
        limit = arrival.max_new_tokens
        if limit is not None and arrival.prompt_len + limit > context_length:
            limit = None
        yield arrival._replace(max_new_tokens=limit)


def check_served(found: CapacityAnswer) -> None:
    """Raises SettingsError if not one request was served, with any settings."""
    if found.knee_point.requests_per_s:
        return
    settings = found.machine.settings
    raise SettingsError(
        f"not one request of this traffic can be served: {settings.context_length:,} tokens of "
        f"context and {found.machine.kv_tokens:,} of KV must have room for a prompt and its output"
    )


def users_of(wanted: WorkloadOptions, lengths: tuple[Lengths, Lengths]) -> ChatUsers:
    """Users who chat, of whom it is not known yet with which model."""
    prompt, output = lengths
    return ChatUsers(
        prompt=prompt,
        output=output,
        turns=wanted.messages,
        think_s=wanted.think_s,
        shared_len=wanted.shared,
        requests=wanted.requests or WorkloadOptions.requests,
    )


def _builds(fixed: Mapping[str, OptionValue], text: str) -> list[Build]:
    """The servers to measure: all combinations of the values in `text`. Raises SettingsError."""
    known = options_by_name(EngineConfig)
    columns: list[list[tuple[str, OptionValue, str]]] = []
    for word in text.split():
        name, equals, values = word.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if not equals or name not in known:
            hint = did_you_mean(name, known)
            raise SettingsError(
                f"--compare has {word!r}; an option of weft serve and its values "
                f"(quantize=none,int8) are expected{hint}"
            )
        if name in fixed:
            raise SettingsError(f"--compare names {name}, which is set to {fixed[name]!r}")
        column = []
        for value in values.split(","):
            read = known[name].from_text(value, f"--compare {name}")
            assert read is not None
            column.append((name, read, value))
        columns.append(column)
    builds = []
    for chosen in itertools.product(*columns):
        options = {**fixed, **{name: value for name, value, _ in chosen}}
        builds.append(Build(" ".join(f"{name}={text}" for name, _, text in chosen), options))
    return builds


def _print(found: Sequence[Planned]) -> None:
    if len(found) > 1:
        print(show.compared([(one.build.name, one.answer) for one in found]))
        stated = [line for one in found for line in stated_quality(one.build.options)]
        for line in dict.fromkeys(stated):  # several builds may have the same option
            print(f"quality    {line}")
        print(f"\n{found[0].build.name}")
    for line in show.lines(found[0].answer):
        print(line)
    for line in found[0].confirmations:
        print(line)


def _as_json(found: Sequence[Planned]) -> dict[str, object]:
    """The best answer, and the others beside it."""
    best = found[0]
    first = to_dict(best.answer)
    first["build"] = best.build.name
    first["confirmations"] = best.confirmations
    first["serve"] = show.serve_line(best.answer, best.answer.best)
    others = [to_dict(one.answer) | {"build": one.build.name} for one in found[1:]]
    return first | {"others": others}


def _write(name: str, text: str) -> None:
    """Raises SettingsError."""
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise SettingsError(f"cannot write {name}: {exc.strerror}") from exc


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

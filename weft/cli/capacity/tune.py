"""The verb `tune`: which settings of a running server should change, from its journal; with
`--apply` they change, and requests continue.

weft tune --trace traffic.journal
weft tune --trace traffic.journal --slo-ttft 0.5 --apply
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from weft.capacity.answer import CapacityAnswer, Question, answer
from weft.capacity.axes.axis import Axis, AxisValue, SettingAxis, Values
from weft.capacity.axes.table import AXES
from weft.capacity.machine import MeasuredMachine
from weft.capacity.workload import RecordedTraffic
from weft.cli.capacity.options import WorkloadOptions
from weft.cli.capacity.plan import (
    SearchTime,
    check_served,
    journal_in,
    machine_of,
    recorded_in,
    workload_of,
)
from weft.cli.capacity.show import plain_text
from weft.cli.remote import RemoteServer, error_of, no_access
from weft.config.options import Command, SettingsError, asked_help, option
from weft.engine.control.settings import CHANGEABLE
from weft.json_types import JsonObject
from weft.scheduler.settings import SchedulerSettings
from weft.sim.synthetic import Lengths
from weft.sim.table import level_in, number

ABOUT = (
    "Which settings of a running server should change, from what it has recorded (weft serve "
    "--journal), and with --apply change them."
)
TIMEOUT_S = 60.0
AT_THE_RECORDED_RATE = 1.0
# Of the requests within the bounds: a change after which fewer are may serve these few by letting
# all others wait.
LEAST_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    url: str = option("http://127.0.0.1:30000", "the running server", group="tune", everyday=True)
    api_key: str = option("", "its administration key", group="tune", everyday=True)
    apply: bool = option(False, "change the settings", group="tune", everyday=True)
    search_s: float = option(45.0, "time for the search", group="tune", low=1.0, high=86_400.0)


def tune(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit status."""
    command = Command("weft tune", ABOUT, TuneOptions, WorkloadOptions)
    section = asked_help(argv)
    if section is not None:
        print(command.help(section))
        return 0
    settings = command.read(argv, os.environ)
    options = settings.make(TuneOptions)
    wanted = settings.make(WorkloadOptions)
    server = RemoteServer(options.url, options.api_key)
    state = _asked(server, "GET", "/get_internal_state")["server_args"]
    journal = journal_in(wanted.trace)
    if journal is None:
        raise SettingsError(f"--trace is {wanted.trace!r}; the server's journal is expected")
    recorded = machine_of(journal, "", {})
    machine = now_running(recorded, state)
    prompt = Lengths.parse(wanted.prompt, "--prompt")
    output = Lengths.parse(wanted.output, "--output")
    lengths = prompt, output
    workload = workload_of(wanted, lengths, machine, journal, recorded_in(wanted, journal))
    level = AT_THE_RECORDED_RATE if isinstance(workload, RecordedTraffic) else 0.0
    axes = live_axes(journal.settings, state)
    question = Question(workload, wanted.wanted, axes, wanted_level=level)
    found = answer(machine, question, SearchTime(options.search_s))
    check_served(found)
    for line in lines(found, machine):
        print(line)
    changes = advised(found)
    if changes and options.apply:
        _asked(server, "POST", "/set_internal_state", {"server_args": dict(changes)})
        print("changed; requests continue. The settings of the start are in no file: note these")
    elif changes:
        print("weft tune --apply changes this now")
    return 0


def live_axes(settings: SchedulerSettings, state: Mapping[str, AxisValue]) -> list[Axis]:
    """The axes that a server with these settings at its start can change, with the values that it
    accepts: memory was laid out for those of its start. They bound what is tried, and not the
    present ones, which may be far too low."""

    def accepted(axis: Axis) -> Values:
        check = CHANGEABLE[axis.name]

        def values(machine: MeasuredMachine, now: SchedulerSettings) -> Sequence[AxisValue]:
            at_start = msgspec.structs.replace(machine, settings=settings)
            return [value for value in axis.values(at_start, now) if not check(value, settings)]

        return values

    live = [axis for axis in AXES if axis.is_live and axis.name in state]
    return [SettingAxis(axis.name, accepted(axis), is_live=True) for axis in live]


def now_running(machine: MeasuredMachine, state: Mapping[str, AxisValue]) -> MeasuredMachine:
    """The machine with the settings that the server has now."""
    known = {name: value for name, value in state.items() if hasattr(machine.settings, name)}
    changes: dict[str, Any] = dict(known)
    settings = replace(machine.settings, **changes)
    return msgspec.structs.replace(machine, settings=settings)


def advised(found: CapacityAnswer) -> Mapping[str, AxisValue]:
    """What should change: nothing where most requests miss the bounds with any settings."""
    if found.best.point.good_share < LEAST_SHARE:
        return {}
    return found.best.changes


def lines(found: CapacityAnswer, machine: MeasuredMachine) -> list[str]:
    """What should change, and what that brings."""
    base = found.base.point
    best = found.best
    found_lines = []
    if not found.is_complete:
        found_lines.append("the time for the search (--search-s) ended before it was complete")
    at = level_in(found.unit, base.level)
    changes = advised(found)
    if not changes:
        most = ""
        if best.changes:
            most = f" than {best.point.good_share:.0%}"
        return [
            *found_lines,
            f"nothing: at {at} {base.good_share:.0%} of requests are within the bounds, and no "
            f"other setting that was tried brings more{most}",
        ]
    for name, value in changes.items():
        before = getattr(machine.settings, name)
        found_lines.append(f"{name}: {plain_text(before)} -> {plain_text(value)}")
    found_lines.append(
        f"at {at}: {base.good_share:.0%} -> {best.point.good_share:.0%} of requests within the "
        f"bounds, TTFT p50 {number(base.ttft_s[0])} -> {number(best.point.ttft_s[0])} s, "
        f"ITL p50 {number(1e3 * base.itl_s[0])} -> {number(1e3 * best.point.itl_s[0])} ms"
    )
    return found_lines


def _asked(server: RemoteServer, method: str, path: str, body: JsonObject | None = None) -> Any:
    """The answer of a route. Raises SettingsError."""
    content = None if body is None else json.dumps(body)
    with closing(server.connect(TIMEOUT_S)) as connection:
        try:
            connection.request(method, server.path + path, content, server.headers)
            response = connection.getresponse()
            if response.status == 401:
                raise SettingsError(no_access(response))
            if response.status != 200:
                raise SettingsError(f"{path} answers {response.status}: {error_of(response)}")
            return json.load(response)
        except SettingsError:  # a ValueError, too
            raise
        except OSError as exc:
            raise server.missing(exc) from exc
        except (http.client.HTTPException, ValueError) as exc:
            raise SettingsError(f"{server.address} does not answer as a weft server") from exc

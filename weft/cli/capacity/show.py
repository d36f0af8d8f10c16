"""The answer of a plan as text: the curve, the knee, the settings, and how far to trust them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from weft.capacity.answer import CapacityAnswer, CurvePoint
from weft.capacity.axes.axis import AxisValue
from weft.capacity.fleet import FleetPoint
from weft.capacity.search import Candidate
from weft.cli.capacity.served import words_of
from weft.sim.report import Slo
from weft.sim.table import level, level_in, number, table

BAR_LEN = 30
KNEE_OPTION = "knee_output_per_s"


def lines(found: CapacityAnswer) -> Iterator[str]:
    machine = found.machine
    yield (
        f"machine    {machine.name}, {machine.model or 'the default model'}: "
        f"{machine.num_steps:,} steps measured, half of them met to {machine.median_error:.0%}"
    )
    spread = machine.spread
    yield (
        f"           its speed went from {spread.slow - 1:+.0%} to {spread.fast - 1:+.0%}; "
        f"front {1e3 * machine.front.request_s:.1f} ms a request"
    )
    yield f"searched   {found.num_trials} simulations" + (
        "" if found.is_complete else "; the time for the search ended before it was complete"
    )
    yield ""
    yield _curve_table(found)
    yield ""
    yield from _knee(found)
    yield f"limit      {found.limit.name}: {found.limit.reason}"
    yield (
        f"memory     {found.kv_tokens:,} tokens of KV do as well as the "
        f"{machine.kv_tokens:,} of now"
    )
    if found.per_million:
        yield f"price      {number(found.per_million)} for a million output tokens at the knee"
    if found.fleet:
        yield ""
        yield from _fleet(found)
    yield ""
    yield from _settings(found)


def _curve_table(found: CapacityAnswer) -> str:
    header = [found.unit, "good", "good/s", "slow ... fast", "tok/s", "TTFT p50", "p99"]
    header += ["ITL p50", "p99", ""]
    highest = max(one.point.good_per_s for one in found.curve) or 1.0
    rows = [_curve_row(one, highest, found.knee) for one in found.curve]
    return table(header, rows)


def _curve_row(one: CurvePoint, highest: float, knee: float) -> list[str]:
    point = one.point
    bar = "#" * round(BAR_LEN * point.good_per_s / highest)
    mark = " < knee" if point.level == knee else ""
    return [
        level(point.level),
        f"{point.good_share:.0%}",
        number(point.good_per_s),
        f"{number(one.slow.good_per_s)} ... {number(one.fast.good_per_s)}",
        number(point.output_per_s),
        f"{number(point.ttft_s[0])} s",
        f"{number(point.ttft_s[1])} s",
        f"{number(1e3 * point.itl_s[0])} ms",
        f"{number(1e3 * point.itl_s[1])} ms",
        (bar + mark).ljust(BAR_LEN + 7),
    ]


def _knee(found: CapacityAnswer) -> Iterator[str]:
    bounds = found.wanted
    words = f"{bounds.share:.0%} of requests {_within(bounds.slo)}"
    low = level(found.knee_range.low)
    high = level(found.knee_range.high)
    if not found.knee:
        least = level_in(found.unit, found.curve[0].point.level)
        yield f"knee       none: at the lowest level, {least}, less than {words}"
    else:
        yield (
            f"knee       {level_in(found.unit, found.knee)} "
            f"({low} to {high} as the machine's speed varies): {words}"
        )
    yield f"           with the settings it was measured with: {level(found.base_knee)}"


def _within(slo: Slo) -> str:
    parts = []
    if math.isfinite(slo.ttft_s):
        parts.append(f"within {slo.ttft_s:g} s to the first token")
    if math.isfinite(slo.itl_s):
        parts.append(f"within {1e3 * slo.itl_s:g} ms between tokens")
    return " and ".join(parts) or "served"


def _fleet(found: CapacityAnswer) -> Iterator[str]:
    header = ["machines", "router", found.unit, "good/s", "tok/s", "busiest", "add at", "remove at"]
    yield table(header, [_fleet_row(one) for one in found.fleet])
    yield (
        'add a machine if each has more running requests than under "add at" for a minute, '
        'remove one below "remove at" (num_running_reqs in GET /v1/loads)'
    )


def _fleet_row(one: FleetPoint) -> list[str]:
    figures = [one.level, one.good_per_s, one.output_per_s, one.busiest, one.add_at, one.remove_at]
    return [str(one.machines), one.router, *map(number, figures)]


def _settings(found: CapacityAnswer) -> Iterator[str]:
    best = found.best
    if not best.changes:
        yield "settings   those that it was measured with are the best that were found:"
    for name, value in best.changes.items():
        before = getattr(found.machine.settings, name)
        yield f"settings   {name} = {plain_text(value)} instead of {plain_text(before)}"
    yield f"    {serve_line(found, best)}"
    others = [other for other in found.candidates if other is not best]
    for other in others:
        changes = ", ".join(f"{name}={plain_text(value)}" for name, value in other.changes.items())
        yield (
            f"next       {changes or 'no change'}: {number(other.point.good_per_s)} good/s at "
            f"{level_in(found.unit, other.point.level)} (best: {number(best.point.good_per_s)})"
        )


def serve_line(found: CapacityAnswer, candidate: Candidate) -> str:
    words = words_of({**found.machine.options, **written(candidate.changes)})
    model = [found.machine.model] if found.machine.model else []
    return " ".join(["weft", "serve", *model, *words])


def toml(found: CapacityAnswer) -> str:
    """The settings as a file for `weft serve --config`."""
    values: dict[str, AxisValue] = {}
    if found.machine.model:
        values["model"] = found.machine.model
    values |= {**found.machine.options, **written(found.best.changes)}
    values[KNEE_OPTION] = round(found.knee_point.output_per_s, 1)
    text = [f"# weft plan: {level_in(found.unit, found.knee)} at the knee"]
    text += [f"{name} = {_toml_value(value)}" for name, value in values.items()]
    return "\n".join(text) + "\n"


def written(changes: Mapping[str, AxisValue]) -> dict[str, AxisValue]:
    return dict(changes)


def plain_text(value: AxisValue) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def _toml_value(value: AxisValue) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)


def compared(answers: Sequence[tuple[str, CapacityAnswer]]) -> str:
    """A table with a row for each of several measured servers."""
    rows = []
    for name, found in answers:
        point = found.knee_point
        rows.append(
            [
                name,
                level(found.knee),
                f"{level(found.knee_range.low)} ... {level(found.knee_range.high)}",
                number(point.good_per_s),
                number(point.output_per_s),
                f"{number(point.ttft_s[0])} s",
                f"{number(1e3 * point.itl_s[0])} ms",
            ]
        )
    unit = answers[0][1].unit
    header = ["", f"{unit} at the knee", "slow ... fast", "good/s", "tok/s", "TTFT p50", "ITL p50"]
    return table(header, rows)

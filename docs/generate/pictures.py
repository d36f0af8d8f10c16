"""Draws the pictures of the README and of the architecture from the code, so that they stay true.

    python docs/generate/pictures.py           writes docs/img/{house,steps}.svg
    python docs/generate/pictures.py --check   writes nothing; status 1 names the pictures that are not up to date

The house: every package of weft is a room. A room stands above all rooms that it imports; an arrow leads from a room to
one that it imports, unless the way leads through another room anyway.

The steps: the scheduler itself runs eight requests in virtual time, and its plans are drawn, a column each.
"""

from __future__ import annotations

import ast
import html
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from generated import write_or_check

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from weft.engine.engine import Engine  # noqa: E402
from weft.plan.device import DeviceRequest  # noqa: E402
from weft.plan.step import Pending, Plan, Step  # noqa: E402
from weft.scheduler.settings import SchedulerSettings  # noqa: E402
from weft.sim.cost import CostRunner, TrueLengths, VirtualClock  # noqa: E402
from weft.sim.run import EngineTarget, Run  # noqa: E402
from weft.sim.trace import EOS, Arrival, Segment, TokenSource  # noqa: E402

PACKAGE = ROOT / "weft"
IMAGES = ROOT / "docs" / "img"

ROOM_WIDTH = 152
ROOM_HEIGHT = 66
GAP_X = 22
GAP_Y = 40
MARGIN = 16
# A module of weft has a line of its own for each import, which names the whole path (tests/test_imports.py).
IMPORT = re.compile(r"^[ \t]*(?:from|import) weft\.(\w+)", re.MULTILINE)
PURE = {"scheduler", "memory", "plan"}  # no I/O, no clock, no thread, no torch
FRONT = {"server", "client", "text"}
DEVICE = {"executor", "models", "ops", "parallel"}
COLOURS = {"pure": "#fde9c8", "front": "#dcebfa", "device": "#dff3df", "other": "#f1f1f1"}


def rooms() -> list[str]:
    """The packages of weft, but for the data that comes with it."""
    return sorted(
        path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))
    )


def imports(room: str) -> set[str]:
    """The rooms that the files of `room` import, wherever they do."""
    found: set[str] = set()
    for path in (PACKAGE / room).rglob("*.py"):
        found |= set(IMPORT.findall(path.read_text("utf-8")))
    return (found & set(rooms())) - {room}


def direct(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The imports of each room that no other import leads to anyway."""

    @cache
    def below(room: str) -> frozenset[str]:
        found = set(graph[room])
        for one in graph[room]:
            found |= below(one)
        return frozenset(found)

    kept: dict[str, set[str]] = {}
    for room, imported in graph.items():
        through_others: set[str] = set()
        for one in imported:
            through_others |= below(one)
        kept[room] = imported - through_others
    return kept


def floors(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The rooms by floor, the highest first. A room stands one floor above the highest room that it imports."""

    @cache
    def height(room: str) -> int:
        return 1 + max((height(one) for one in graph[room]), default=-1)

    highest = max(height(room) for room in graph)
    return [
        sorted(room for room in graph if height(room) == floor) for floor in range(highest, -1, -1)
    ]


def about(room: str) -> str:
    """The first words of the package's docstring."""
    init = PACKAGE / room / "__init__.py"
    text = (ast.get_docstring(ast.parse(init.read_text("utf-8"))) or "") if init.exists() else ""
    return text.split("\n")[0].split(". ")[0].rstrip(".")


def kind(room: str) -> str:
    for name, members in (("pure", PURE), ("front", FRONT), ("device", DEVICE)):
        if room in members:
            return name
    return "other"


def house() -> Iterator[str]:
    graph = {room: imports(room) for room in rooms()}
    levels = floors(graph)
    widest = max(len(level) for level in levels)
    width = 2 * MARGIN + widest * ROOM_WIDTH + (widest - 1) * GAP_X
    height = 2 * MARGIN + len(levels) * ROOM_HEIGHT + (len(levels) - 1) * GAP_Y + 24
    places: dict[str, tuple[float, float]] = {}
    for row, level in enumerate(levels):
        row_width = len(level) * ROOM_WIDTH + (len(level) - 1) * GAP_X
        left = (width - row_width) / 2
        for column, room in enumerate(level):
            x = left + column * (ROOM_WIDTH + GAP_X)
            y = MARGIN + row * (ROOM_HEIGHT + GAP_Y)
            places[room] = (x, y)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" role="img" aria-label="The packages of weft and their imports">'
    )
    yield f'<rect width="{width}" height="{height}" fill="#ffffff" rx="8"/>'
    yield (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
        'markerHeight="6" orient="auto"><path d="M0 0 8 4 0 8z" fill="#8a8a8a"/></marker></defs>'
    )
    for room, imported in direct(graph).items():
        for target in sorted(imported):
            yield _arrow(places[room], places[target])
    for room, (x, y) in places.items():
        yield from _room(room, x, y)
    yield from _legend(height - 14)
    yield "</svg>"


def _arrow(above: tuple[float, float], below: tuple[float, float]) -> str:
    x1 = above[0] + ROOM_WIDTH / 2
    y1 = above[1] + ROOM_HEIGHT
    x2 = below[0] + ROOM_WIDTH / 2
    y2 = below[1] - 2
    bend = (y2 - y1) / 2
    return (
        f'<path d="M{x1:g} {y1:g} C{x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2:g}" '
        'fill="none" stroke="#b0b0b0" marker-end="url(#tip)"/>'
    )


def _room(room: str, x: float, y: float) -> Iterator[str]:
    colour = COLOURS[kind(room)]
    text_x = x + ROOM_WIDTH / 2
    yield (
        f'<rect x="{x:g}" y="{y:g}" width="{ROOM_WIDTH}" height="{ROOM_HEIGHT}" rx="6" '
        f'fill="{colour}" stroke="#777777"/>'
    )
    yield (
        f'<text x="{text_x:g}" y="{y + 18:g}" text-anchor="middle" font-size="14" '
        f'font-weight="bold" fill="#222222">{room}</text>'
    )
    for number, line in enumerate(_wrapped(about(room))):
        yield (
            f'<text x="{text_x:g}" y="{y + 33 + 11 * number:g}" text-anchor="middle" '
            f'font-size="9" fill="#444444">{html.escape(line)}</text>'
        )


def _wrapped(text: str, columns: int = 26, most: int = 3) -> list[str]:
    """`text` in at most `most` lines of at most about `columns` characters."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > columns:
            if len(lines) == most:
                lines[-1] += " ..."
                break
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _legend(y: float) -> Iterator[str]:
    words = {
        "pure": "pure core: no I/O, clock, thread or torch",
        "front": "front process",
        "device": "computes on the device",
        "other": "the rest",
    }
    x = float(MARGIN)
    for name, text in words.items():
        yield (
            f'<rect x="{x:g}" y="{y - 9:g}" width="10" height="10" fill="{COLOURS[name]}" '
            'stroke="#777777"/>'
        )
        yield f'<text x="{x + 15:g}" y="{y:g}" font-size="10" fill="#444444">{text}</text>'
        x += 35 + 5.4 * len(text)


# Steps

COLUMN_WIDTH = 34
LANE_HEIGHT = 26
LABEL_WIDTH = 150
PREFILL = "#f4b860"
DECODE = "#7fb3e6"
CACHED = "#fdf0d5"
SHARED = Segment(key=0, length=48)  # a prefix that five of the eight requests begin with


class Lane(NamedTuple):
    """A request of the picture."""

    what: str
    arrival: Arrival


def lanes() -> list[Lane]:
    def arrival(time_s: float, output_len: int, *prompt: Segment) -> Arrival:
        return Arrival(time_s, prompt, output_len, max_new_tokens=output_len + 4)

    return [
        Lane("shared prefix", arrival(0.0, 14, SHARED, Segment(1, 10))),
        Lane("short", arrival(0.0, 9, Segment(2, 12))),
        Lane("long prompt", arrival(2.0, 6, Segment(3, 110))),
        Lane("same prefix", arrival(3.0, 8, SHARED, Segment(4, 8))),
        Lane("same prefix", arrival(3.0, 5, SHARED, Segment(5, 14))),
        Lane("short", arrival(9.0, 7, Segment(6, 20))),
        Lane("same prefix", arrival(11.0, 6, SHARED, Segment(7, 6))),
        Lane("same prefix", arrival(11.0, 4, SHARED, Segment(8, 9))),
    ]


class Cell(NamedTuple):
    """What one request runs in one step."""

    step: int
    start: int  # tokens that are computed already
    length: int  # tokens to compute
    samples: bool


class NotingRunner:
    """A runner of the simulation that notes the plans it gets."""

    def __init__(self, runner: CostRunner) -> None:
        self.plans: list[Plan] = []
        self._runner = runner

    def launch(self, plan: Plan) -> Step:
        self.plans.append(plan)
        return self._runner.launch(plan)

    def control(self, request: DeviceRequest) -> Pending:
        return self._runner.control(request)


class UnitCost:
    """Every step takes one second, so that times are numbers of steps."""

    def seconds(self, load: object) -> float:
        return 1.0


def cells() -> list[list[Cell]]:
    """For each request of the picture what it runs in the steps of the simulation."""
    settings = SchedulerSettings(
        num_pages=64,
        page_size=4,
        max_running_requests=5,
        context_length=256,
        vocab_size=32_768,
        eos_token_ids=(EOS,),
        chunked_prefill_size=48,
        max_prefill_tokens=48,
        mixed_chunk=True,
        schedule_policy="lpm",
        aging_s=0.0,
    )
    clock = VirtualClock()
    lengths = TrueLengths()
    runner = NotingRunner(CostRunner(UnitCost(), clock, lengths))
    engine = Engine(settings, runner, clock=clock, overlap=False, on_failure=_raise)
    tokens = TokenSource(settings.vocab_size)
    run = Run(EngineTarget(engine, clock), tokens, lengths)
    run.play(lane.arrival for lane in lanes())
    return _by_request(runner.plans)


def _by_request(plans: list[Plan]) -> list[list[Cell]]:
    """A plan names rows; a step that samples names the request, too, by its seed."""
    found: list[list[Cell]] = [[] for _ in lanes()]
    unnamed: dict[int, list[Cell]] = {}
    for step, plan in enumerate(plans):
        seeds = iter(plan.sampling.seeds.tolist())
        for row, start, length, samples in zip(
            plan.rows.tolist(),
            plan.starts.tolist(),
            plan.lens.tolist(),
            plan.samples.tolist(),
            strict=True,
        ):
            unnamed.setdefault(row, []).append(Cell(step, start, length, samples))
            if samples:
                found[next(seeds)] += unnamed.pop(row)
    return found


def _raise(exc: Exception) -> None:
    raise exc


def steps() -> Iterator[str]:
    drawn = cells()
    num_steps = 1 + max(row[-1].step for row in drawn)
    width = LABEL_WIDTH + num_steps * COLUMN_WIDTH + MARGIN
    height = 2 * MARGIN + 18 + len(drawn) * LANE_HEIGHT + 30
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" role="img" aria-label="Eight requests in the steps of a scheduler">'
    )
    yield f'<rect width="{width}" height="{height}" fill="#ffffff" rx="8"/>'
    for step in range(num_steps):
        x = LABEL_WIDTH + (step + 0.5) * COLUMN_WIDTH
        yield _text(x, MARGIN + 8, str(step + 1), 10, "#888888", "middle")
    for index, (lane, row) in enumerate(zip(lanes(), drawn, strict=True)):
        y = MARGIN + 18 + index * LANE_HEIGHT
        yield _text(MARGIN, y + 16, f"{index + 1}  {lane.what}", 12, "#222222", "start")
        yield from _lane(lane, row, y)
    yield from _key(height - 14)
    yield "</svg>"


def _lane(lane: Lane, row: list[Cell], y: float) -> Iterator[str]:
    arrived = LABEL_WIDTH + lane.arrival.time_s * COLUMN_WIDTH
    began = LABEL_WIDTH + row[0].step * COLUMN_WIDTH
    if began > arrived:
        middle = y + LANE_HEIGHT / 2 - 1
        yield (
            f'<path d="M{arrived:g} {middle:g}H{began:g}" stroke="#bbbbbb" stroke-width="2" '
            'stroke-dasharray="3 3"/>'
        )
    prompt_len = lane.arrival.prompt_len
    for number, cell in enumerate(row):
        x = LABEL_WIDTH + cell.step * COLUMN_WIDTH
        is_prefill = cell.start < prompt_len
        colour = PREFILL if is_prefill else DECODE
        yield (
            f'<rect x="{x + 1:g}" y="{y + 2:g}" width="{COLUMN_WIDTH - 2}" '
            f'height="{LANE_HEIGHT - 6}" rx="3" fill="{colour}"/>'
        )
        middle = x + COLUMN_WIDTH / 2
        if number == 0 and cell.start > 0:
            yield (
                f'<rect x="{x + 1:g}" y="{y + 2:g}" width="{COLUMN_WIDTH - 2}" height="8" rx="3" '
                f'fill="{CACHED}"/>'
            )
            yield _text(middle, y + 9, f"{cell.start} cached", 6.5, "#8a6d3b", "middle")
            yield _text(middle, y + 19, str(cell.length), 9, "#222222", "middle")
        elif is_prefill:
            yield _text(middle, y + 16, str(cell.length), 10, "#222222", "middle")


def _key(y: float) -> Iterator[str]:
    words = [
        (PREFILL, "prompt tokens computed in this step"),
        (CACHED, "prompt tokens found in the cache"),
        (DECODE, "one token decoded"),
    ]
    x = float(MARGIN)
    for colour, text in words:
        yield f'<rect x="{x:g}" y="{y - 9:g}" width="10" height="10" fill="{colour}"/>'
        yield _text(x + 15, y, text, 10, "#444444", "start")
        x += 35 + 5.4 * len(text)
    yield f'<path d="M{x:g} {y - 4:g}h24" stroke="#bbbbbb" stroke-width="2" stroke-dasharray="3 3"/>'
    yield _text(x + 30, y, "waits", 10, "#444444", "start")


def _text(x: float, y: float, text: str, size: float, colour: str, anchor: str) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}" '
        f'text-anchor="{anchor}">{html.escape(text)}</text>'
    )


PICTURES = {"house.svg": house, "steps.svg": steps}


if __name__ == "__main__":
    sys.exit(write_or_check("pictures.py", IMAGES, PICTURES))

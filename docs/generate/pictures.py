"""Draws the pictures of the README and of the architecture from the code, so that they stay true.

    python docs/generate/pictures.py           writes docs/img/house.svg
    python docs/generate/pictures.py --check   writes nothing; status 1 names the pictures that are not up to date

The house: every package of weft is a room. A room stands above all rooms that it imports; an arrow leads from a room to
one that it imports, unless the way leads through another room anyway.
"""

from __future__ import annotations

import ast
import html
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "weft"
IMAGES = ROOT / "docs" / "img"

ROOM_WIDTH = 152
ROOM_HEIGHT = 66
GAP_X = 22
GAP_Y = 40
MARGIN = 16
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
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [f"{node.module}.{item.name}" for item in node.names]
            elif isinstance(node, ast.Import):
                names = [item.name for item in node.names]
            else:
                continue
            for name in names:
                parts = name.split(".")
                if parts[0] == "weft" and len(parts) > 1:
                    found.add(parts[1])
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


PICTURES = {"house.svg": house}


def main() -> int:
    stale = []
    for name, draw in PICTURES.items():
        path = IMAGES / name
        text = "\n".join(draw()) + "\n"
        if path.exists() and path.read_text("utf-8") == text:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if "--check" not in sys.argv:
            path.write_text(text, "utf-8")
    if stale and "--check" in sys.argv:
        print("not up to date: " + ", ".join(stale) + " (python docs/generate/pictures.py)")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The curve of goodput as a picture, without a library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from weft.capacity.answer import CapacityAnswer, CurvePoint
from weft.config.options import SettingsError
from weft.config.outputs import wrong_file
from weft.sim.table import number

WIDTH = 640
HEIGHT = 360
LEFT = 64
RIGHT = 16
TOP = 40
BOTTOM = 48
NUM_TICKS = 4


class Scale(NamedTuple):
    """The largest values on both axes."""

    level: float
    good_per_s: float

    def x(self, level: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * level / self.level

    def y(self, good_per_s: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * good_per_s / self.good_per_s


def wrong_svg(name: str) -> str:
    """Why the curve cannot be drawn into the file `name`; "" if it can."""
    if name and Path(name).suffix.lower() != ".svg":
        return "a name that ends in .svg is expected"
    return wrong_file(name)


def write_svg(name: str, found: CapacityAnswer) -> None:
    """Raises SettingsError."""
    try:
        Path(name).write_text(svg(found), encoding="utf-8")
    except OSError as exc:
        raise SettingsError(f"cannot write {name}: {exc.strerror}") from exc


def svg(found: CapacityAnswer) -> str:
    """Goodput against the level, between the machine's slowest and fastest speed, and the knee."""
    curve = found.curve
    highest = max(max(point.fast.good_per_s, point.point.good_per_s) for point in curve)
    scale = Scale(max(curve[-1].point.level, 1e-9), max(1.1 * highest, 1e-9))
    middle = " ".join(_at(scale, one.point.level, one.point.good_per_s) for one in curve)
    knee_x = scale.x(found.knee)
    title = escape(f"{found.machine.model or 'default model'} on {found.machine.name}")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20">{title}</text>',
        *_ticks(scale),
        f'<polygon points="{_band(scale, curve)}" fill="#cfe0f5"/>',
        f'<polyline points="{middle}" fill="none" stroke="#1f5fa8" stroke-width="2"/>',
        f'<line x1="{knee_x:.1f}" x2="{knee_x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" '
        'stroke="#b03030" stroke-dasharray="4 3"/>',
        f'<text x="{knee_x + 4:.1f}" y="{TOP + 12}">knee: {number(found.knee)}</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(found.unit)}</text>',
        f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {HEIGHT / 2})">good requests a second</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _at(scale: Scale, level: float, good_per_s: float) -> str:
    return f"{scale.x(level):.1f},{scale.y(good_per_s):.1f}"


def _band(scale: Scale, curve: Sequence[CurvePoint]) -> str:
    upper = [_at(scale, one.point.level, one.fast.good_per_s) for one in curve]
    lower = [_at(scale, one.point.level, one.slow.good_per_s) for one in reversed(curve)]
    return " ".join([*upper, *lower])


def _ticks(scale: Scale) -> list[str]:
    lines = []
    for index in range(NUM_TICKS + 1):
        level = scale.level * index / NUM_TICKS
        rate = scale.good_per_s * index / NUM_TICKS
        x = scale.x(level)
        y = scale.y(rate)
        lines.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        )
        lines.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(rate)}</text>'
        )
        lines.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
            f"{number(level)}</text>"
        )
    return lines

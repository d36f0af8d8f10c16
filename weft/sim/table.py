"""Plain text tables, and readable numbers."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with columns as wide as needed: the first is left-aligned, the others
    right-aligned."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    head, *body = (_line(line, widths) for line in lines)
    rule = "-" * len(head)
    return "\n".join([head, rule, *body])


def level(value: float) -> str:
    """`number`, but all digits of what is whole: users are counted."""
    return f"{value:,.0f}" if float(value).is_integer() else number(value)


def level_in(unit: str, value: float) -> str:
    """A level with its unit: 1 user, 5 users."""
    return f"{level(value)} {unit.removesuffix('s') if value == 1 else unit}"


def number(value: float) -> str:
    """Three significant digits: 0.0712, 3.40, 52.1, 1,234."""
    if value != value:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    if abs(value) >= 1:
        return f"{value:.2f}"
    return f"{value:.3g}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = [cells[0].ljust(widths[0])]
    for cell, width in zip(cells[1:], widths[1:], strict=True):
        aligned.append(cell.rjust(width))
    return "  ".join(aligned).rstrip()

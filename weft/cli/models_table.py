"""The models of a server as lines: one for each, with its state, its memory and its requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from weft.config.amounts import size
from weft.json_types import JsonObject

TITLES = ("NAME", "STATE", "MEMORY", "CONTEXT", "OPEN", "WAITING", "UNTIL")
UNLOADED = ("unloaded", "failed")


def models_table(answer: Any) -> Iterator[str]:
    """Lines for the answer of `GET /models`."""
    yield from _lines(answer["data"])


def loaded_table(answer: Any) -> Iterator[str]:
    """The same, for the models in memory alone."""
    rows = [one for one in answer["data"] if one["status"]["value"] not in UNLOADED]
    if rows:
        yield from _lines(rows)
    else:
        yield "no model is loaded"


def _lines(models: Sequence[JsonObject]) -> Iterator[str]:
    rows = [TITLES, *(_row(one) for one in models)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(TITLES))]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(cells).rstrip()
    for one in models:
        if one["status"]["reason"]:
            yield f"{one['id']}: {one['status']['reason']}"


def _row(one: JsonObject) -> tuple[str, ...]:
    status = one["status"]
    state = status["value"]
    if status["position"] is not None:
        state += f" ({status['position']} before it, {status['eta_s']:.0f} s)"
    memory = one["memory_bytes"] or one["full_bytes"] or one["size_bytes"]
    return (
        one["id"] + (" *" if one["is_default"] else ""),
        state,
        size(memory) if memory else "-",
        f"{one['context_length']:,}" if one["context_length"] else "-",
        str(one["open_requests"]),
        str(one["waiting_requests"]),
        _until(one),
    )


def _until(one: JsonObject) -> str:
    if one["pin"]:
        return "pinned"
    left_s = one["expires_in_s"]
    if left_s is None:
        return "needed" if one["status"]["value"] not in UNLOADED else "-"
    return f"{left_s:.0f} s idle"

"""Traces from files in two published formats, distinguished by their first character.

BurstGPT (arXiv:2401.17644), CSV; failed requests have no response tokens and are left out:

    Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
    5,ChatGPT,472,18,490,Conversation log

Mooncake (arXiv:2407.00079), JSON lines; milliseconds, and an id for each block of 512 prompt
tokens, equal for equal blocks after equal blocks:
    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from weft.config.numbers import counted, shown
from weft.config.options import SettingsError
from weft.sim.trace import LONGEST, Arrival, Segment

BLOCK_LEN = 512
COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")


class _WrongLine(ValueError):
    """A line that is no request."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"line {number:,}: {why}")


def read_trace(name: str, *, max_tokens: int, speed: float = 1.0) -> Iterator[Arrival]:
    """The arrivals in a file; with `speed` 2 they come twice as fast. Raises SettingsError, also
    during iteration, and if there is none.

    These files do not have the limits that users set: `max_new_tokens` is `max_tokens`, or the
    output's length if that is more.
    """
    try:
        with open(name, encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            lines = chain([first], file)
            is_json = first.lstrip().startswith("{")
            arrivals = _mooncake(lines) if is_json else _burst_gpt(lines)
            yield from _in_order(name, arrivals, max_tokens, speed)
    except OSError as exc:
        raise SettingsError(f"cannot read the trace {name}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise SettingsError(f"cannot read the trace {name}: it is not text in UTF-8") from exc


def _in_order(
    name: str, arrivals: Iterator[Arrival], max_tokens: int, speed: float
) -> Iterator[Arrival]:
    """Make times start at 0 and never decrease. Raises SettingsError for a line that is not a
    request."""
    began_s = math.nan
    time_s = 0.0
    try:
        for arrival in arrivals:
            if math.isnan(began_s):
                began_s = arrival.time_s
            time_s = max(time_s, (arrival.time_s - began_s) / speed)
            allowed = max(max_tokens, arrival.output_len)
            yield arrival._replace(time_s=time_s, max_new_tokens=allowed)
    except _WrongLine as exc:
        raise SettingsError(
            f"{name} is neither BurstGPT's CSV nor Mooncake's JSON lines: {exc}"
        ) from exc
    if math.isnan(began_s):
        raise SettingsError(f"{name} has no requests; 1 or more are needed")


def _burst_gpt(lines: Iterable[str]) -> Iterator[Arrival]:
    reader = csv.DictReader(lines)
    for column in COLUMNS:
        if column not in (reader.fieldnames or [column]):
            raise _WrongLine(1, f"there is no column {column!r}; {', '.join(COLUMNS)} are needed")
    for key, line in enumerate(reader):
        prompt_len = _length(reader.line_num, line, "Request tokens")
        output_len = _length(reader.line_num, line, "Response tokens")
        if not prompt_len or not output_len:
            continue
        yield Arrival(
            time_s=_number(reader.line_num, line, "Timestamp"),
            prompt=(Segment(key, prompt_len),),
            output_len=output_len,
            max_new_tokens=output_len,
            tenant=line["Model"],
        )


def _mooncake(lines: Iterable[str]) -> Iterator[Arrival]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        request = _object(number, line)
        prompt_len = _length(number, request, "input_length")
        output_len = _length(number, request, "output_length")
        time_ms = _number(number, request, "timestamp")
        ids = request.get("hash_ids")
        if not isinstance(ids, list) or not all(type(id) is int for id in ids):
            why = f"hash_ids is {shown(ids)}; a list of whole numbers is needed"
            raise _WrongLine(number, why)
        if not prompt_len or not output_len:
            continue
        # Whole blocks of 512 tokens, and a shorter last block for the rest.
        blocks, rest = divmod(prompt_len, BLOCK_LEN)
        num_blocks = blocks + (rest > 0)
        if len(ids) != num_blocks:
            why = (
                f"hash_ids has the length {len(ids):,}; {num_blocks:,} is expected for "
                f"{counted(prompt_len, 'token')}"
            )
            raise _WrongLine(number, why)
        lens = [BLOCK_LEN] * blocks
        if rest:
            lens.append(rest)
        yield Arrival(
            time_s=time_ms / 1e3,
            prompt=tuple(map(Segment, ids, lens)),
            output_len=output_len,
            max_new_tokens=output_len,
        )


def _object(number: int, line: str) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise _WrongLine(number, f"it is not valid JSON: {exc}") from exc
    if not isinstance(request, dict):
        raise _WrongLine(number, f"it is {shown(request)}; an object is needed")
    return request


def _length(number: int, line: Mapping[str, Any], name: str) -> int:
    """A number of tokens, 0 or more."""
    value = _number(number, line, name)
    if not 0 <= value <= LONGEST:
        raise _WrongLine(number, f"{name} is {shown(line[name])}; 0 to {LONGEST:,} are allowed")
    return int(value)


def _number(number: int, line: Mapping[str, Any], name: str) -> float:
    """The number in a field of a line."""
    value = line.get(name)
    try:
        if value is None or isinstance(value, bool):
            raise TypeError
        found = float(value)
    except (TypeError, ValueError, OverflowError) as exc:
        raise _WrongLine(number, f"{name} is {shown(value)}; a number is needed") from exc
    if not math.isfinite(found):
        raise _WrongLine(number, f"{name} is {shown(value)}; a finite number is needed")
    return found

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
from collections.abc import Iterable, Iterator
from itertools import chain

from weft.config.options import SettingsError
from weft.sim.trace import Arrival, Segment

BLOCK_LEN = 512


def read_trace(name: str, *, max_tokens: int, speed: float = 1.0) -> Iterator[Arrival]:
    """The arrivals in a file; with `speed` 2 they come twice as fast. Raises SettingsError, also
    during iteration.

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
    except (OSError, UnicodeDecodeError) as exc:
        raise SettingsError(f"cannot read the trace {name}: {exc}") from exc


def _in_order(
    name: str, arrivals: Iterator[Arrival], max_tokens: int, speed: float
) -> Iterator[Arrival]:
    """Make times start at 0 and never decrease. Raises SettingsError for a line that is not a
    request."""
    began_s = 0.0
    time_s = 0.0
    number = 0
    try:
        for number, arrival in enumerate(arrivals):
            if number == 0:
                began_s = arrival.time_s
            time_s = max(time_s, (arrival.time_s - began_s) / speed)
            allowed = max(max_tokens, arrival.output_len)
            yield arrival._replace(time_s=time_s, max_new_tokens=allowed)
    except (LookupError, TypeError, ValueError) as exc:
        raise SettingsError(
            f"{name}: what follows request {number} is neither BurstGPT's CSV nor Mooncake's "
            f"JSON lines ({exc!r})"
        ) from exc


def _burst_gpt(lines: Iterable[str]) -> Iterator[Arrival]:
    for key, line in enumerate(csv.DictReader(lines)):
        prompt_len = int(float(line["Request tokens"]))
        output_len = int(float(line["Response tokens"]))
        if prompt_len <= 0 or output_len <= 0:
            continue
        yield Arrival(
            time_s=float(line["Timestamp"]),
            prompt=(Segment(key, prompt_len),),
            output_len=output_len,
            max_new_tokens=output_len,
            tenant=line["Model"],
        )


def _mooncake(lines: Iterable[str]) -> Iterator[Arrival]:
    for line in lines:
        if not line.strip():
            continue
        request = json.loads(line)
        prompt_len = request["input_length"]
        output_len = request["output_length"]
        ids = request["hash_ids"]
        if prompt_len <= 0 or output_len <= 0:
            continue
        # Whole blocks of 512 tokens, and a shorter last block for the rest.
        blocks, rest = divmod(prompt_len, BLOCK_LEN)
        lens = [BLOCK_LEN] * blocks
        if rest:
            lens.append(rest)
        if len(ids) != len(lens):
            raise ValueError(
                f"the request has {len(ids):,} hash_ids, which do not fit its {prompt_len:,} tokens"
            )
        yield Arrival(
            time_s=request["timestamp"] / 1e3,
            prompt=tuple(map(Segment, ids, lens)),
            output_len=output_len,
            max_new_tokens=output_len,
        )

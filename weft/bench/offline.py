"""Speed of a model in this process, for one stream and for many: no server, no network, no tokenizer.

What runs a load is handed in: this file says which loads, and what their times mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Load(NamedTuple):
    """`num_streams` requests that come at once, each with its own prompt, with exactly these lengths."""

    num_streams: int
    input_len: int
    output_len: int


class Times(NamedTuple):
    """What one run of a load took. Seconds."""

    total_s: float  # until the last token
    ttft_s: float  # median over the streams
    itl_s: float  # median over all tokens but the first


class Speed(NamedTuple):
    """The medians of several runs of a load."""

    load: Load
    output_per_s: float  # output tokens a second, over the whole run
    total_per_s: float  # prompt and output
    ttft_s: float
    itl_s: float
    slowest_per_s: float  # of the runs, in output tokens a second
    fastest_per_s: float


def measure(loads: Sequence[Load], run: Callable[[Load], Times], *, repeats: int) -> list[Speed]:
    """Run each load once to warm up, and then `repeats` times."""
    return [_speed(load, [run(load) for _ in range(repeats + 1)][1:]) for load in loads]


def _speed(load: Load, times: Sequence[Times]) -> Speed:
    output = load.num_streams * load.output_len
    speeds = sorted(output / each.total_s for each in times)
    median = statistics.median(speeds)
    return Speed(
        load=load,
        output_per_s=median,
        total_per_s=median * (load.input_len + load.output_len) / load.output_len,
        ttft_s=statistics.median(each.ttft_s for each in times),
        itl_s=statistics.median(each.itl_s for each in times),
        slowest_per_s=speeds[0],
        fastest_per_s=speeds[-1],
    )

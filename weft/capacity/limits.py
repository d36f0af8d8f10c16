"""What limits a machine at a level, from the figures of a simulation there."""

from __future__ import annotations

from typing import NamedTuple

from weft.capacity.trial import LoadPoint
from weft.sim.report import Slo

FULL_KV = 0.9  # of the pool
FULL_ROWS = 0.9  # of all rows, on average
MOSTLY = 0.5


class Limit(NamedTuple):
    """`name`: memory, rows, front, prompts, compute, bandwidth or streaming."""

    name: str
    reason: str


def what_limits(point: LoadPoint, slo: Slo) -> Limit:
    """The bottleneck. `point`: best at the first level that is not borne."""
    if point.retractions or point.kv_use > FULL_KV:
        return Limit(
            "memory",
            f"{point.kv_use:.0%} of the KV pool are in use, {point.retractions:,} requests lost "
            "their memory and were computed again: fewer bits of KV or shorter contexts help",
        )
    if point.front_s > MOSTLY * min(point.ttft_s[0], slo.ttft_s):
        return Limit("front", f"a request spends {point.front_s:.3f} s in the front")
    if point.row_use > FULL_ROWS and point.device_use < 1 - MOSTLY / 2:
        return Limit("rows", "all rows are in use: --max-running-requests")
    if point.device_use < MOSTLY and point.ttft_s[1] > slo.ttft_s:
        return Limit(
            "prompts",
            f"the device works {point.device_use:.0%} of the time, and still one first token in a "
            f"hundred takes {point.ttft_s[1]:.2f} s: long prompts take that long alone; a cache of "
            "prompts, shorter ones or faster cores help",
        )
    parts = point.parts
    seconds = {
        "bandwidth": parts.weights_s + parts.context_s,
        "compute": parts.compute_s,
        "streaming": parts.sample_s,
    }
    reasons = {
        "bandwidth": "in each step all weights, and the KV of its requests, are read from memory: "
        "fewer bits of weights or KV help, or more requests in each step",
        "compute": "the tokens of prompts and answers keep the cores busy: more or faster cores "
        "help, a cache of prompts, shorter prompts",
        "streaming": "the head, sampling, and sending of each new token",
    }
    total_s = max(sum(seconds.values()), 1e-9)
    name = max(seconds, key=lambda each: seconds[each])
    shares = ", ".join(f"{part} {value / total_s:.0%}" for part, value in seconds.items())
    return Limit(name, f"{reasons[name]} ({shares} of the time of steps)")

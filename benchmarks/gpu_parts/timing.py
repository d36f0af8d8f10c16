"""How long something takes on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def seconds(work: Callable[[], object], device: str, repeats: int = 20) -> float:
    """The median of several runs, after two that do not count. On a GPU every run is timed there, behind a wipe of its
    second-level cache."""
    work()
    work()
    if device == "cpu":
        return statistics.median(_once(work) for _ in range(repeats))
    wipe = torch.empty(256 << 20, dtype=torch.int8, device=device)
    events = []
    for _ in range(repeats):
        wipe.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1_000


def _once(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began

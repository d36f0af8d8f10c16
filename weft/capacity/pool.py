"""The least KV memory with which settings do as well."""

from __future__ import annotations

from dataclasses import replace

from weft.capacity.trial import LoadTrials
from weft.scheduler.settings import SchedulerSettings

SAME = 0.99  # of the goodput
MAX_HALVINGS = 8


def least_kv_tokens(trials: LoadTrials, settings: SchedulerSettings, level: float) -> int:
    """In tokens: the pool is halved as long as goodput stays the same."""
    wanted = SAME * trials.point(settings, level).good_per_s
    found = settings
    for _ in range(MAX_HALVINGS):
        smaller = replace(found, num_pages=found.num_pages // 2)
        if smaller.num_pages < 1 or trials.point(smaller, level).good_per_s < wanted:
            break
        found = smaller
    return found.num_pages * found.page_size

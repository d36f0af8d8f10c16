"""The requests that get faster or slower with other settings: a comparison of two runs, request by
request."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.sim.report import e2e_of
from weft.sim.run import Record
from weft.sim.table import number, table

SAME = 0.01  # relative changes of end-to-end time below this count as the same
NUM_WORST = 10


class Change(NamedTuple):
    """One request in both runs."""

    number: int  # index in the trace
    tenant: int
    prompt_len: int
    output_len: int
    before_s: float  # end to end
    after_s: float


class Changes(NamedTuple):
    num_better: int
    num_worse: int
    num_same: int
    num_lost: int  # finished in only one of the runs
    worst: list[Change]  # requests with the largest losses of time, largest first


def changes(before: Record, after: Record) -> Changes:
    """Compare each request of a trace in two runs, `before` and `after`."""
    n = min(len(before), len(after))
    old = e2e_of(before)[:n]
    new = e2e_of(after)[:n]
    both = ~np.isnan(old) & ~np.isnan(new)
    delta = np.where(both, new - old, 0.0)
    matters = np.abs(delta) > SAME * np.where(both, old, 0.0)
    better = matters & (delta < 0)
    worse = matters & (delta > 0)
    worst = []
    for i in np.argsort(-delta, kind="stable")[:NUM_WORST].tolist():
        if worse[i]:
            change = Change(
                number=i,
                tenant=int(after.tenant.indices[i]),
                prompt_len=int(after.prompt_len[i]),
                output_len=int(after.output_len[i]),
                before_s=float(old[i]),
                after_s=float(new[i]),
            )
            worst.append(change)
    return Changes(
        num_better=int(better.sum()),
        num_worse=int(worse.sum()),
        num_same=int((both & ~matters).sum()),
        num_lost=int((np.isnan(old) != np.isnan(new)).sum()),
        worst=worst,
    )


def describe(name: str, base: str, found: Changes) -> str:
    """The changes as text lines."""
    lost = ""
    if found.num_lost:
        lost = f", in one of them only: {found.num_lost:,}"
    lines = [
        f"{name} against {base}: requests that end sooner: {found.num_better:,}, "
        f"later: {found.num_worse:,}, within {SAME:.0%}: {found.num_same:,}{lost}"
    ]
    if found.worst:
        header = ["worst", "prompt", "output", "E2E before", "after", "change"]
        rows = [
            [
                f"#{change.number} (tenant {change.tenant})",
                f"{change.prompt_len:,}",
                f"{change.output_len:,}",
                f"{number(change.before_s)} s",
                f"{number(change.after_s)} s",
                f"+{number(change.after_s - change.before_s)} s",
            ]
            for change in found.worst
        ]
        lines.append(table(header, rows))
    return "\n".join(lines)

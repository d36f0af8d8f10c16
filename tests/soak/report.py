"""What a run has shown, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from itertools import groupby
from statistics import median
from typing import Any

from tests.soak.audit import Audit
from tests.soak.driver import Report

MIN_SLOPE_S = 300.0  # of a server's life; in less than that memory has not come to rest
MAX_GROWTH = 0.10  # of resident memory, from the first third of a server's audits to the last


def growth(audits: list[Audit], name: str) -> float:
    """How much a figure has grown: the median of the last third over that of the first, less 1."""
    values = [float(getattr(audit, name)) for audit in audits]
    third = max(1, len(values) // 3)
    return median(values[-third:]) / median(values[:third]) - 1


def slope_mb_per_hour(audits: list[Audit], name: str) -> float:
    """Least squares over the second half of a server's life."""
    late = audits[len(audits) // 2 :]
    times = [a.at_s for a in late]
    values = [float(getattr(a, name)) for a in late]
    mean_t = sum(times) / len(times)
    mean_v = sum(values) / len(values)
    spread = sum((t - mean_t) ** 2 for t in times)
    if spread == 0:
        return 0.0
    return (
        3600 * sum((t - mean_t) * (v - mean_v) for t, v in zip(times, values, strict=True)) / spread
    )


def memory(report: Report) -> list[dict[str, Any]]:
    """Of each server: how its memory has developed. Those that lived for long enough and have grown
    are faults."""
    found = []
    for server, phases in groupby(report.phases, key=lambda phase: phase.server):
        audits = [phase.audit for phase in phases if phase.audit is not None]
        if len(audits) < 3:
            continue
        life_s = audits[-1].at_s - audits[0].at_s
        for name in ("front_rss_mb", "engine_rss_mb"):
            grown = growth(audits, name)
            judged = life_s >= MIN_SLOPE_S
            if judged and grown > MAX_GROWTH:
                report.fault(f"server {server}: {name} has grown by {grown:.0%} in {life_s:.0f} s")
            found.append(
                {
                    "server": server,
                    "figure": name,
                    "seconds": round(life_s),
                    "first": getattr(audits[0], name),
                    "last": getattr(audits[-1], name),
                    "growth": round(grown, 4),
                    "slope_mb_per_hour": round(slope_mb_per_hour(audits, name), 1),
                    "judged": judged,
                }
            )
    return found


def as_json(report: Report) -> dict[str, Any]:
    developed = memory(report)
    return {
        "seed": report.seed,
        "requests": sum(report.kinds.values()),
        "ends": dict(ends(report).most_common()),
        "kinds": dict(report.kinds.most_common()),
        "asked_again": sum(phase.asked_again for phase in report.phases),
        "tokens": sum(phase.tokens for phase in report.phases),
        "slowest_health_s": max((phase.slowest_health_s for phase in report.phases), default=0.0),
        "num_faults": report.num_faults,
        "faults": report.faults,
        "memory": developed,
        "phases": [asdict(phase) for phase in report.phases],
    }


def ends(report: Report) -> Counter[str]:
    found: Counter[str] = Counter()
    for phase in report.phases:
        found.update(phase.ends)
    return found


def as_table(found: dict[str, Any]) -> str:
    """Lines to read, of what `as_json` gives."""
    head = ("phase", "seconds", "sent", "complete", "abort", "left", "errors", "health s")
    head += ("slots", "open", "fds", "threads", "front MB", "engine MB")
    rows = [head, *(_row(phase) for phase in found["phases"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    lines.append("")
    lines.append(f"{found['requests']:,} requests, each with its end: {_counts(found['ends'])}")
    lines.append(
        f"{found['asked_again']:,} answers compared with what an idle server says to the same request"
    )
    lines += [
        f"server {one['server']} {one['figure']}: {one['first']} to {one['last']} in {one['seconds']} s "
        f"({one['growth']:+.1%}, {one['slope_mb_per_hour']:+} MB/h in its second half)"
        for one in found["memory"]
    ]
    lines.append(f"{found['num_faults']} faults" + (":" if found["faults"] else ""))
    return "\n".join(lines + [f"  {fault}" for fault in found["faults"]])


def _row(phase: dict[str, Any]) -> tuple[str, ...]:
    ends = phase["ends"]
    audit = phase["audit"]
    errors = sum(number for end, number in ends.items() if end.startswith("error"))
    audited = ("-",) * 6
    if audit is not None:
        audited = (
            str(audit["used_slots"]),
            str(audit["open_requests"] + audit["open_completions"]),
            f"{audit['front_fds']}+{audit['engine_fds']}",
            f"{audit['front_threads']}+{audit['engine_threads']}",
            str(audit["front_rss_mb"]),
            str(audit["engine_rss_mb"]),
        )
    numbers = (
        phase["seconds"],
        phase["sent"],
        ends.get("complete", 0),
        ends.get("abort", 0),
        ends.get("left", 0),
    )
    return (
        phase["name"],
        *map(str, numbers),
        str(errors),
        str(phase["slowest_health_s"]),
        *audited,
    )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in counts.items())

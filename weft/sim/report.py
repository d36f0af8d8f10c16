"""Summaries of a run: rates, percentiles, cache hits, fairness, goodput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from weft.arrays import BoolArray
from weft.config.numbers import counted
from weft.json_types import JsonObject
from weft.sim.outcome import ABORTED, DONE, REFUSED
from weft.sim.run import DoubleArray, Labels, Record
from weft.sim.table import number, table

Percentiles: TypeAlias = tuple[float, float, float]
PERCENTS = (50, 90, 99)


class BackgroundFigures(NamedTuple):
    """Background requests beside others. Rates are tokens a second up to the end of the last other
    request: generated ones, and with those of prompts."""

    requests: int
    finished: int
    output_per_s: float
    total_per_s: float
    both_output_per_s: float  # with those of the others
    both_total_per_s: float
    retractions: int


class Slo(NamedTuple):
    """The bounds that a request must keep to count for goodput: time to the first token, and mean
    time between tokens."""

    ttft_s: float = float("inf")
    itl_s: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Figures of one run. Times are in seconds. Percentiles are p50, p90, p99 of the served
    requests; those of `itl_s` are of all tokens. Served requests are those that finished, or were
    aborted after their first token."""

    requests: int
    finished: int
    aborted: int  # by their clients
    refused: int  # refused, or ended by the engine
    refused_by: dict[str, int]  # by reason
    duration_s: float  # from the first arrival to the last token
    requests_per_s: float
    output_per_s: float  # tokens
    total_per_s: float  # prompt and output tokens
    ttft_s: Percentiles
    itl_s: Percentiles
    e2e_s: Percentiles
    hit_rate: float  # prompt tokens found in the cache
    retractions: int
    evicted_tokens: int
    row_use: float  # mean share of rows that decode, over the decode steps
    device_use: float  # share of time in which the device is busy
    fairness: float  # Jain's index over tenants; 1: all are served at the same speed
    good_per_s: float  # requests within the SLO
    good_share: float
    busiest: float = 1.0  # of several engines: the largest working time, divided by the mean
    encoder_runs: int = 0
    encoded_tokens: int = 0
    encoder_hits: int = 0  # pictures that were already encoded when a prompt needed them
    encoder_s: float = 0.0  # working time of encoders
    # None: there are none, or no others; all other figures are of the others.
    background: BackgroundFigures | None = None

    def to_dict(self) -> JsonObject:
        """The figures for JSON: undefined values are null."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def summarize(record: Record, slo: Slo) -> Summary:
    if not record.background.any():
        return _summary(record, slo)
    summary = _summary(_part(record, ~record.background), slo)
    return replace(summary, background=_background(record, summary))


def _part(record: Record, wanted: BoolArray) -> Record:
    """The record of the `wanted` [N] requests."""
    found: dict[str, Any] = {}
    for item in fields(record):
        value = getattr(record, item.name)
        if isinstance(value, np.ndarray):
            found[item.name] = value[wanted]
        elif isinstance(value, Labels):
            found[item.name] = value.some(wanted)
    return replace(record, **found)


def _background(record: Record, others: Summary) -> BackgroundFigures:
    seconds = others.duration_s
    output_per_s = record.beside.num_output / seconds
    total_per_s = output_per_s + record.beside.num_prompt / seconds
    return BackgroundFigures(
        requests=int(record.background.sum()),
        finished=int((record.background & (record.state == DONE)).sum()),
        output_per_s=output_per_s,
        total_per_s=total_per_s,
        both_output_per_s=others.output_per_s + output_per_s,
        both_total_per_s=others.total_per_s + total_per_s,
        retractions=int(record.retractions[record.background].sum()),
    )


def _summary(record: Record, slo: Slo) -> Summary:
    done = was_served(record)
    num_done = int(done.sum())
    duration = _duration_s(record)
    prompt = int(record.prompt_len[done].sum())
    output = int(record.output_len[done].sum())
    ttft = ttft_of(record)
    e2e = e2e_of(record)
    is_prompt = ttft <= slo.ttft_s
    # A request of one token has no time between tokens, so it keeps any bound on it.
    is_fluent = ~(mean_itl_of(record) > slo.itl_s)
    num_good = int((done & is_prompt & is_fluent).sum())
    num_cached = int(record.cached_len[done].sum())
    machine = record.machine
    gaps = record.gaps
    return Summary(
        requests=len(record),
        finished=int((record.state == DONE).sum()),
        aborted=int((record.state == ABORTED).sum()),
        refused=int((record.state == REFUSED).sum()),
        refused_by=refused_by(record),
        duration_s=duration,
        requests_per_s=num_done / duration,
        output_per_s=output / duration,
        total_per_s=(prompt + output) / duration,
        ttft_s=percentiles(ttft[done]),
        itl_s=(gaps.percentile(50), gaps.percentile(90), gaps.percentile(99)),
        e2e_s=percentiles(e2e[done]),
        hit_rate=num_cached / max(prompt, 1),
        retractions=int(record.retractions.sum()),
        evicted_tokens=machine.evicted_tokens,
        row_use=machine.meter.mean_rows / max(machine.num_rows, 1),
        # With overlap, a step may still run after the last token.
        device_use=min(machine.meter.busy_s / duration, 1.0),
        fairness=fairness(record),
        good_per_s=num_good / duration,
        good_share=num_good / max(len(record), 1),
        busiest=machine.busiest,
        encoder_runs=machine.encoder_runs,
        encoded_tokens=machine.encoded_tokens,
        encoder_hits=machine.encoder_hits,
        encoder_s=machine.encoder_s,
    )


def was_served(record: Record) -> BoolArray:
    """[N] whether a request finished, or got tokens before its client left."""
    has_some = (record.state == ABORTED) & (record.output_len > 0)
    served: BoolArray = (record.state == DONE) | has_some
    return served


def refused_by(record: Record, tenant: int | None = None) -> dict[str, int]:
    """The number of refused requests by reason, of all tenants or of one."""
    refused = record.state == REFUSED
    if tenant is not None:
        refused &= record.tenant.indices == tenant
    found: dict[str, int] = {}
    for index, reason in sorted(enumerate(record.reason.names), key=lambda each: each[1]):
        num = int((refused & (record.reason.indices == index)).sum())
        if num:
            found[reason] = num
    return found


def _duration_s(record: Record) -> float:
    """From the first arrival to the last token; NaN if no request was served."""
    ends = record.end_s[was_served(record)]
    if not len(ends):
        return float("nan")
    began_s = np.nanmin(record.sent_s)
    # Never 0, because rates are divided by it.
    return max(float(ends.max() - began_s), 1e-9)


def ttft_of(record: Record) -> DoubleArray:
    """[N] seconds to the first token; for requests without output tokens, to the end."""
    wanted_none = (record.state == DONE) & (record.output_len == 0)
    first_s = np.where(wanted_none, record.end_s, record.first_s)
    return first_s - record.sent_s


def e2e_of(record: Record) -> DoubleArray:
    """[N] seconds to the last token; NaN for requests that were not served."""
    seconds = record.end_s - record.sent_s
    return np.where(was_served(record), seconds, np.nan)


def mean_itl_of(record: Record) -> DoubleArray:
    """[N] mean seconds between the tokens of a request; NaN for requests of one token."""
    num_gaps = (record.output_len - 1).astype(np.float64)
    num_gaps = np.where(num_gaps > 0, num_gaps, np.nan)
    return (record.end_s - record.first_s) / num_gaps


def fairness(record: Record) -> float:
    """Jain's index of the speeds at which tenants were served: (sum x)^2 / (n sum x^2).

    A tenant's speed is its output tokens, divided by the time that its requests were present. So a
    tenant with more requests does not look better served, and one with longer waits looks worse.
    Source: Jain, Chiu and Hawe, DEC-TR-301 (1984).
    """
    done = was_served(record)
    if not done.any():
        return float("nan")
    tenants = record.tenant.indices[done]
    seconds = record.end_s - record.sent_s
    present = np.bincount(tenants, weights=seconds[done])
    tokens = np.bincount(tenants, weights=record.output_len[done])
    was_here = present > 0
    speeds = tokens[was_here] / present[was_here]
    if not len(speeds):
        return float("nan")
    square_of_sum = speeds.sum() ** 2
    sum_of_squares = (speeds**2).sum()
    return float(square_of_sum / (len(speeds) * sum_of_squares))


def percentiles(values: NDArray[np.float64]) -> Percentiles:
    values = values[~np.isnan(values)]
    if not len(values):
        return (float("nan"),) * 3
    p50, p90, p99 = np.percentile(values, PERCENTS).tolist()
    return p50, p90, p99


# Tables


def describe(summary: Summary) -> str:
    """One run as text lines."""
    times = []
    for name, values in _times(summary).items():
        times.append([name, *map(_seconds, values)])
    facts = [
        f"{counted(summary.requests, 'request')} in {_seconds(summary.duration_s)}: "
        f"{_ends(summary)}",
        f"throughput   {number(summary.requests_per_s)} requests/s, "
        f"{number(summary.output_per_s)} output tokens/s, {number(summary.total_per_s)} with "
        "prompts",
        f"goodput      {number(summary.good_per_s)} requests/s ({summary.good_share:.1%})",
        f"cache        {summary.hit_rate:.1%} of prompt tokens hit, {summary.evicted_tokens:,} "
        "tokens evicted",
        f"retractions  {summary.retractions:,}",
        f"utilisation  {summary.row_use:.1%} of rows, device busy {summary.device_use:.1%} of "
        "the time",
        f"fairness     {summary.fairness:.3f} (Jain, over tenants)",
    ]
    if summary.busiest != 1.0:
        facts.append(f"replicas     the busiest works {summary.busiest:.2f} times the mean")
    background = summary.background
    if background is not None:
        facts.append(
            f"background   {background.finished:,} of {background.requests:,} requests finished, "
            f"{background.retractions:,} retractions"
        )
        facts.append(
            f"             {number(background.output_per_s)} output tokens/s beside the others, "
            f"{number(background.total_per_s)} with prompts; together "
            f"{number(background.both_output_per_s)} and {number(background.both_total_per_s)}"
        )
    if summary.encoder_runs:
        facts.append(
            f"encoder      {counted(summary.encoder_runs, 'run')}, "
            f"{counted(summary.encoded_tokens, 'token')} in {_seconds(summary.encoder_s)}; "
            f"{counted(summary.encoder_hits, 'time')} found encoded"
        )
    return "\n".join([*facts, "", table(["", "p50", "p90", "p99"], times)])


def _ends(summary: Summary) -> str:
    words = f"{summary.finished:,} finished, "
    if summary.aborted:
        words += f"{summary.aborted:,} aborted, "
    words += f"{summary.refused:,} refused"
    reasons = [f"{num:,} {reason}" for reason, num in summary.refused_by.items()]
    if reasons:
        words += f" ({', '.join(reasons)})"
    return words


def outcomes(names: Sequence[str], summaries: Sequence[Summary]) -> str:
    """A table of the outcomes of requests, with a row per run."""
    reasons = sorted({reason for each in summaries for reason in each.refused_by})
    rows = []
    for name, each in zip(names, summaries, strict=True):
        counts = [each.requests, each.finished, each.aborted, each.refused]
        counts += [each.refused_by.get(reason, 0) for reason in reasons]
        rows.append([name, *(f"{count:,}" for count in counts)])
    return table(["", "requests", "finished", "aborted", "refused", *reasons], rows)


MAX_TENANTS = 20  # tenants that are listed


STATES = (DONE, ABORTED, REFUSED)


def by_tenant(record: Record) -> str:
    """A table with a row per tenant, most output tokens first; empty for a single tenant."""
    if len(record.tenant.names) < 2:
        return ""
    ttft = ttft_of(record)
    e2e = e2e_of(record)
    served = np.bincount(
        record.tenant.indices, weights=record.output_len, minlength=len(record.tenant.names)
    )
    reasons = list(refused_by(record))
    rows = []
    for tenant in np.argsort(-served, kind="stable")[:MAX_TENANTS].tolist():
        is_theirs = record.tenant.indices == tenant
        done = is_theirs & was_served(record)
        why = refused_by(record, tenant)
        first = percentiles(ttft[done])
        whole = percentiles(e2e[done])
        row = [
            record.tenant.names[tenant] or "(none)",
            f"{int(is_theirs.sum()):,}",
            *(f"{int((is_theirs & (record.state == state)).sum()):,}" for state in STATES),
            *(f"{why.get(reason, 0):,}" for reason in reasons),
            f"{int(served[tenant]):,}",
            f"{int(record.cached_len[done].sum()):,}",
            _seconds(first[0]),
            _seconds(first[2]),
            _seconds(whole[0]),
        ]
        rows.append(row)
    ends = ["finished", "aborted", "refused", *reasons]
    times = ["TTFT p50", "p99", "E2E p50"]
    return table(["tenant", "requests", *ends, "tokens", "cached", *times], rows)


COLUMNS = [
    "",
    "req/s",
    "tok/s",
    "TTFT p50",
    "p99",
    "ITL p50",
    "p99",
    "E2E p50",
    "p99",
    "hits",
    "retr.",
    "rows",
    "fair",
]


def compare(names: Sequence[str], summaries: Sequence[Summary]) -> str:
    """A table with a row per run."""
    rows = []
    columns = [*COLUMNS, "good"]
    sees = any(each.encoder_runs for each in summaries)
    if sees:
        columns += ["enc. runs", "enc. s"]
    for name, each in zip(names, summaries, strict=True):
        row = [name, number(each.requests_per_s), number(each.output_per_s)]
        for p50, _, p99 in _times(each).values():
            row += [_seconds(p50), _seconds(p99)]
        row += [
            f"{each.hit_rate:.1%}",
            f"{each.retractions:,}",
            f"{each.row_use:.1%}",
            f"{each.fairness:.3f}",
            f"{each.good_share:.1%}",
        ]
        if sees:
            row += [f"{each.encoder_runs:,}", number(each.encoder_s)]
        rows.append(row)
    return table(columns, rows)


def _times(summary: Summary) -> dict[str, Percentiles]:
    return {"TTFT": summary.ttft_s, "ITL": summary.itl_s, "E2E": summary.e2e_s}


def _seconds(value: float) -> str:
    """Seconds as readable text: 3.40 s, 52.1 ms."""
    if not value < 1:
        return f"{number(value)} s"
    return f"{number(1e3 * value)} ms"


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return dict(zip(("p50", "p90", "p99"), map(_plain, value), strict=True))
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value

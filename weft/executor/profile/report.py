"""What took most in a trace of the profiler, and the trace made small: `python -m` this, a trace,
the spans of time that our own kernels have noted, and where to put both together.

A process of its own, for a trace has some hundred thousand events, and reading them would keep the
engine from its work: both are Python, and only one thread of a process runs that. Knows the file's
format, not what made it.
"""

from __future__ import annotations

import gzip
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

NUM_ROWS = 10
NAME_LEN = 60
NICENESS = 10
ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
OPERATION = "cpu_op"  # category of operations of the CPU
STEP = "weft_step"  # of whole steps of our kernels: their operations stand in them
TRACK = "weft kernels"  # in place of a thread: several compute one operation together


class TraceEvent(msgspec.Struct, gc=False):
    """One span of time; of other kinds of events no more is read than that they are others."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0  # microseconds
    dur: float = 0.0


class TraceFile(msgspec.Struct, rename={"events": "traceEvents"}):
    events: list[TraceEvent]


class KernelSpan(NamedTuple):
    """A span of time of our own kernels; nanoseconds since 1970."""

    name: str
    began_ns: int
    took_ns: int


class OperationTime:
    """Time in one operation: its own, and with what it has called."""

    __slots__ = ("calls", "own", "total")

    def __init__(self) -> None:
        self.calls = 0
        self.own = 0.0
        self.total = 0.0


def main(trace: Path, spans: Path, target: Path | None) -> None:
    """Print the tables of `trace` and `spans`, and leave both as one trace at `target` (.gz), whole
    or not at all."""
    kernel_spans = msgspec.json.decode(spans.read_bytes(), type=list[KernelSpan])
    merged = with_spans(trace.read_bytes(), kernel_spans)
    events = msgspec.json.decode(merged, type=TraceFile).events
    print("\n".join(tables(events)))
    if target is not None:
        part = target.with_name(f".{target.name}")
        with gzip.open(part, "wb", compresslevel=5) as packed:
            packed.write(merged)
        part.replace(target)


def with_spans(trace: bytes, spans: list[KernelSpan]) -> bytes:
    """A trace with more spans of time in it, on a track of their own."""
    if not spans:
        return trace
    content = msgspec.json.decode(trace, type=dict[str, msgspec.Raw])
    base_ns = 0
    if "baseTimeNanoseconds" in content:
        base_ns = msgspec.json.decode(content["baseTimeNanoseconds"], type=int)
    events = msgspec.json.decode(content["traceEvents"], type=list[msgspec.Raw])
    for span in spans:
        events.append(msgspec.Raw(msgspec.json.encode(_event(span, base_ns))))
    content["traceEvents"] = msgspec.Raw(msgspec.json.encode(events))
    return msgspec.json.encode(content)


def _event(span: KernelSpan, base_ns: int) -> TraceEvent:
    return TraceEvent(
        ph="X",
        cat=STEP if span.name == "weft::step" else OPERATION,
        name=span.name,
        pid=TRACK,
        tid=TRACK,
        ts=(span.began_ns - base_ns) / 1e3,
        dur=span.took_ns / 1e3,
    )


def tables(events: list[TraceEvent]) -> Iterator[str]:
    """Kernels, if a GPU had any, then operations of the CPU: those that took most time of their
    own."""
    spans = [event for event in events if event.ph == "X"]
    on_device = spent_on(event for event in spans if event.cat in ON_DEVICE)
    if on_device:
        yield from table("GPU", on_device)
        yield ""
    on_cpu = spent_on(event for event in spans if event.cat == OPERATION)
    yield from table("CPU", on_cpu)


def spent_on(events: Iterable[TraceEvent]) -> dict[str, OperationTime]:
    """Time by name of the operation. A span inside of another of the same thread was called by it.

    |<------------ linear ------------>|
        |<- t ->|  |<----- addmm ---->|     own time of linear: what t and addmm leave
    """
    spent: dict[str, OperationTime] = {}
    # The spans around the current one: their ends and operations, the innermost last.
    around: list[tuple[float, OperationTime]] = []
    thread: tuple[int | str, int | str] | None = None
    for event in sorted(events, key=_call_order):
        if (event.pid, event.tid) != thread:
            thread = (event.pid, event.tid)
            around.clear()
        while around and around[-1][0] <= event.ts:
            around.pop()
        operation = spent.setdefault(event.name, OperationTime())
        operation.calls += 1
        operation.own += event.dur
        operation.total += event.dur
        if around:
            around[-1][1].own -= event.dur
        around.append((event.ts + event.dur, operation))
    return spent


def _call_order(event: TraceEvent) -> tuple[str, str, float, float]:
    """By thread and time, callers before what they call."""
    return str(event.pid), str(event.tid), event.ts, -event.dur


def table(where: str, spent: dict[str, OperationTime]) -> Iterator[str]:
    total_us = sum(operation.own for operation in spent.values())
    num_calls = sum(operation.calls for operation in spent.values())
    by_own_time = sorted(spent.items(), key=lambda item: -item[1].own)
    most = by_own_time[:NUM_ROWS]
    width = max((len(name[:NAME_LEN]) for name, _ in most), default=0)
    yield f"{where}: {total_us / 1e3:,.3f} ms in {num_calls:,} operations"
    yield (
        f"{'operation':{width}}  {'own ms':>11}  {'own %':>6}  "
        f"{'total ms':>11}  {'us a call':>11}  {'calls':>8}"
    )
    for name, operation in most:
        percent = 100 * operation.own / (total_us or 1)
        us_per_call = operation.total / operation.calls
        yield (
            f"{name[:NAME_LEN]:{width}}  {operation.own / 1e3:11,.3f}  {percent:6.1f}  "
            f"{operation.total / 1e3:11,.3f}  {us_per_call:11,.1f}  {operation.calls:8,}"
        )


if __name__ == "__main__":
    os.nice(NICENESS)  # the engine goes first
    paths = [Path(argument) for argument in sys.argv[1:]]
    main(paths[0], paths[1], paths[2] if len(paths) > 2 else None)

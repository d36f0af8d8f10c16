"""Makes the report of a profile: prints the operations that took most time, and writes a compressed
trace. Arguments of `python -m`: the trace of the profiler, the spans that weft's kernels recorded,
and the path of the merged trace.

It is a separate process, because a trace has some hundred thousand events, and reading them would
stop the engine: both are Python, and only one thread of a process runs Python. Knows the format of
the file, not its origin.
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
STEP = "weft_step"  # category of whole steps of weft's kernels, which contain their operations
ROUNDING_US = 0.01  # a time in a trace is a float, and may be off by some nanoseconds
TRACK = "weft kernels"  # instead of a thread, because several threads compute an operation together


class TraceEvent(msgspec.Struct, gc=False):
    """One span of time. Of other kinds of events, only the kind is read."""

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
    """A span of time of weft's kernels; nanoseconds since 1970."""

    name: str
    began_ns: int
    took_ns: int


class OperationTime:
    """Time in one operation: its own time, and the time including its calls."""

    __slots__ = ("calls", "own", "total")

    def __init__(self) -> None:
        self.calls = 0
        self.own = 0.0
        self.total = 0.0


def main(trace: Path, spans: Path, target: Path | None) -> None:
    """Print the tables of `trace` and `spans`, and write both as one trace to `target` (.gz),
    atomically."""
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
    """The trace with the spans added, on their own track."""
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
    """The tables of the operations that took most time of their own: kernels of a GPU, if any, then
    operations of the CPU."""
    spans = [event for event in events if event.ph == "X"]
    on_device = spent_on(event for event in spans if event.cat in ON_DEVICE)
    if on_device:
        yield from table("GPU", on_device)
        yield ""
    on_cpu = spent_on(event for event in spans if event.cat == OPERATION)
    yield from table("CPU", on_cpu)


def spent_on(events: Iterable[TraceEvent]) -> dict[str, OperationTime]:
    """Time by name of the operation. A span inside of another one of the same thread is its call.

    |<------------ linear ------------>|
        |<- t ->|  |<----- addmm ---->|     own time of linear: its time minus that of t and addmm
    """
    spent: dict[str, OperationTime] = {}
    # The spans that contain the current one: their ends and operations, the innermost last.
    around: list[tuple[float, OperationTime]] = []
    thread: tuple[int | str, int | str] | None = None
    for event in sorted(events, key=_call_order):
        if (event.pid, event.tid) != thread:
            thread = (event.pid, event.tid)
            around.clear()
        while around and around[-1][0] <= event.ts + ROUNDING_US:
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
    """Sort key: by thread and time, callers before their calls."""
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
    os.nice(NICENESS)  # the engine has priority
    paths = [Path(argument) for argument in sys.argv[1:]]
    main(paths[0], paths[1], paths[2] if len(paths) > 2 else None)

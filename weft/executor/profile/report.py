"""What took most in a trace of the profiler, and the trace made small: `python -m` this, a trace, the spans of time
that our own kernels have noted, and where to put both together.

A process of its own, for a trace has some hundred thousand events, and reading them would keep the engine from its
work: both are Python, and only one thread of a process runs that. Knows the file's format, not what made it.
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
    """Print the tables of `trace` and `spans`, and leave both as one trace at `target` (.gz), whole or not at all."""
    whole = with_spans(
        trace.read_bytes(), msgspec.json.decode(spans.read_bytes(), type=list[KernelSpan])
    )
    print("\n".join(tables(msgspec.json.decode(whole, type=TraceFile).events)))
    if target is not None:
        part = target.with_name(f".{target.name}")
        with gzip.open(part, "wb", compresslevel=5) as packed:
            packed.write(whole)
        part.replace(target)


def with_spans(trace: bytes, spans: list[KernelSpan]) -> bytes:
    """A trace with more spans of time in it, on a track of their own."""
    if not spans:
        return trace
    whole = msgspec.json.decode(trace, type=dict[str, msgspec.Raw])
    base_ns = (
        msgspec.json.decode(whole["baseTimeNanoseconds"], type=int)
        if "baseTimeNanoseconds" in whole
        else 0
    )
    own = [msgspec.Raw(msgspec.json.encode(_event(one, base_ns))) for one in spans]
    events = msgspec.json.decode(whole["traceEvents"], type=list[msgspec.Raw])
    whole["traceEvents"] = msgspec.Raw(msgspec.json.encode(events + own))
    return msgspec.json.encode(whole)


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
    """Kernels, if a GPU had any, then operations of the CPU: those that took most time of their own."""
    on_device = spent_on(event for event in events if event.ph == "X" and event.cat in ON_DEVICE)
    if on_device:
        yield from table("GPU", on_device)
        yield ""
    yield from table(
        "CPU", spent_on(event for event in events if event.ph == "X" and event.cat == OPERATION)
    )


def spent_on(events: Iterable[TraceEvent]) -> dict[str, OperationTime]:
    """Time by name of the operation. A span inside of another of the same thread was called by it.

    |<------------ linear ------------>|
        |<- t ->|  |<----- addmm ---->|     own time of linear: what t and addmm leave
    """
    spent: dict[str, OperationTime] = {}
    open: list[
        tuple[float, OperationTime]
    ] = []  # the spans around this one: their ends and names, the innermost last
    thread: tuple[int | str, int | str] | None = None
    for event in sorted(events, key=lambda one: (str(one.pid), str(one.tid), one.ts, -one.dur)):
        if (event.pid, event.tid) != thread:
            thread = (event.pid, event.tid)
            open.clear()
        while open and open[-1][0] <= event.ts:
            open.pop()
        one = spent.setdefault(event.name, OperationTime())
        one.calls += 1
        one.own += event.dur
        one.total += event.dur
        if open:
            open[-1][1].own -= event.dur
        open.append((event.ts + event.dur, one))
    return spent


def table(where: str, spent: dict[str, OperationTime]) -> Iterator[str]:
    whole = sum(one.own for one in spent.values())
    most = sorted(spent.items(), key=lambda item: -item[1].own)[:NUM_ROWS]
    width = max([len(name[:NAME_LEN]) for name, _ in most], default=0)
    yield f"{where}: {whole / 1e3:,.3f} ms in {sum(one.calls for one in spent.values()):,} operations"
    yield f"{'operation':{width}}  {'own ms':>11}  {'own %':>6}  {'total ms':>11}  {'us a call':>11}  {'calls':>8}"
    for name, one in most:
        yield (
            f"{name[:NAME_LEN]:{width}}  {one.own / 1e3:11,.3f}  {100 * one.own / (whole or 1):6.1f}  "
            f"{one.total / 1e3:11,.3f}  {one.total / one.calls:11,.1f}  {one.calls:8,}"
        )


if __name__ == "__main__":
    os.nice(NICENESS)  # the engine goes first
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)

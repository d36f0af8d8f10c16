"""What took most in a trace of the profiler, and the trace made small: `python -m` this, a trace, and where to put it.

A process of its own, for a trace has some hundred thousand events, and reading them would keep the engine from its
work: both are Python, and only one thread of a process runs that. Knows the file's format, not what made it.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

NUM_ROWS = 10
NAME_LEN = 60
NICENESS = 10
ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


class Event(msgspec.Struct, gc=False):
    """One span of time; of other kinds of events no more is read than that they are others."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0  # microseconds
    dur: float = 0.0


class Trace(msgspec.Struct, rename={"events": "traceEvents"}):
    events: list[Event]


class Spent:
    """Time in one operation: its own, and with what it has called."""

    __slots__ = ("calls", "own", "total")

    def __init__(self) -> None:
        self.calls = 0
        self.own = 0.0
        self.total = 0.0


def main(trace: Path, target: Path | None) -> None:
    """Print the tables of `trace`, and leave it at `target` (.gz), whole or not at all."""
    print("\n".join(tables(msgspec.json.decode(trace.read_bytes(), type=Trace).events)))
    if target is not None:
        part = target.with_name(f".{target.name}")
        with trace.open("rb") as source, gzip.open(part, "wb", compresslevel=5) as packed:
            shutil.copyfileobj(source, packed, 1 << 20)
        part.replace(target)


def tables(events: list[Event]) -> Iterator[str]:
    """Kernels, if a GPU had any, then operations of the CPU: those that took most time of their own."""
    on_device = spent_on(event for event in events if event.ph == "X" and event.cat in ON_DEVICE)
    if on_device:
        yield from table("GPU", on_device)
        yield ""
    yield from table("CPU", spent_on(event for event in events if event.ph == "X" and event.cat == "cpu_op"))


def spent_on(events: Iterable[Event]) -> dict[str, Spent]:
    """Time by name of the operation. A span inside of another of the same thread was called by it.

    |<------------ linear ------------>|
        |<- t ->|  |<----- addmm ---->|     own time of linear: what t and addmm leave
    """
    spent: dict[str, Spent] = {}
    open: list[tuple[float, Spent]] = []  # the spans around this one: their ends and names, the innermost last
    thread: tuple[int | str, int | str] | None = None
    for event in sorted(events, key=lambda one: (str(one.pid), str(one.tid), one.ts, -one.dur)):
        if (event.pid, event.tid) != thread:
            thread = (event.pid, event.tid)
            open.clear()
        while open and open[-1][0] <= event.ts:
            open.pop()
        one = spent.setdefault(event.name, Spent())
        one.calls += 1
        one.own += event.dur
        one.total += event.dur
        if open:
            open[-1][1].own -= event.dur
        open.append((event.ts + event.dur, one))
    return spent


def table(where: str, spent: dict[str, Spent]) -> Iterator[str]:
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
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)

"""A /proc whose threads share a machine with other work, and a clock that is moved by hand.

As in the kernel, the time for which a thread waits for a processor is added only when it gets one.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from weft.client.engine_state import TICK_S, HangDetector
from weft.launch.heartbeat import INTERVAL_S, ActivityMeter
from weft.launch.processor_use import ProcessorUse

SLICE_S = 0.003
ENGINE = 7
MAIN = 7
HEART = 8
SOCKETS = 9
FOLLOWER = 70
WAKE_S = 0.0001  # what a thread computes that only sends a message


@dataclass
class Thread:
    """`wants_s`: processor time that it wanted so far; it gets a slice of every `load` slices."""

    pid: int
    tid: int
    wants_s: float = 0.0
    asked_s: float = 0.0  # when it began to want what it has not got yet
    used_s: float = 0.0
    waited_s: float = 0.0
    state: str = "S"
    looks: str = ""  # the state that who looks sees, if it is another

    def advance(self, now: float, load: float) -> None:
        if self.state == "T":
            self.asked_s = now
            return
        while self.used_s < self.wants_s - 1e-12:
            part = min(SLICE_S, self.wants_s - self.used_s)
            waits_s = SLICE_S * (load - 1)
            if self.asked_s + waits_s + part > now:
                self.state = "R"
                return
            self.asked_s += waits_s + part
            self.waited_s += waits_s
            self.used_s += part
        self.state = "S"
        self.asked_s = now


class Machine:
    """An engine with its main thread, the thread of its heartbeat and one of its sockets, and a
    follower. `load`: threads for each processor."""

    def __init__(self, proc: Path, load: float, *, counts_waiting: bool = True) -> None:
        self.proc = proc
        self.load = load
        self.now = 0.0
        self.computes: set[int] = set()  # threads that want a processor all the time
        self._counts_waiting = counts_waiting
        self._written: dict[int, tuple[object, ...]] = {}
        self.threads = {
            tid: Thread(pid, tid)
            for pid, tid in ((7, MAIN), (7, HEART), (7, SOCKETS), (FOLLOWER, FOLLOWER))
        }
        self.write()

    def move(self, seconds: float) -> None:
        self.now += seconds
        for tid, thread in self.threads.items():
            if tid in self.computes and thread.state != "T":
                thread.wants_s = thread.used_s + 2 * seconds + SLICE_S
            thread.advance(self.now, self.load)
        self.write()

    def wake(self, *tids: int) -> None:
        for tid in tids:
            self.threads[tid].wants_s = max(
                self.threads[tid].wants_s, self.threads[tid].used_s + WAKE_S
            )

    def stop(self) -> None:
        for thread in self.threads.values():
            thread.state = "T"

    def write(self) -> None:
        for thread in self.threads.values():
            known = (thread.used_s, thread.waited_s, thread.looks or thread.state)
            if self._written.get(thread.tid) == known:
                continue
            self._written[thread.tid] = known
            folder = self.proc / str(thread.pid) / "task" / str(thread.tid)
            folder.mkdir(parents=True, exist_ok=True)
            ticks = int(thread.used_s * os.sysconf("SC_CLK_TCK"))
            (folder / "stat").write_text(
                f"{thread.tid} (a ) R (x) {thread.looks or thread.state} 1 7 7 0 -1 4194560 1 0 0 0 {ticks} 0 3 8 20"
            )
            if self._counts_waiting:
                ran = int(thread.used_s * 1e9)
                waited = int(thread.waited_s * 1e9)
                (folder / "schedstat").write_text(f"{ran} {waited} 12\n")

    @property
    def used_s(self) -> float:
        """Of the engine, without the thread of its heartbeat."""
        return sum(self.threads[tid].used_s for tid in (MAIN, SOCKETS))


class Watched:
    """The heartbeat of such an engine and the front's judgement of it."""

    def __init__(self, machine: Machine, detector: HangDetector) -> None:
        self._machine = machine
        self.detector = detector
        observer = ProcessorUse([ENGINE, FOLLOWER], but=HEART, proc=machine.proc)
        self.meter = ActivityMeter(machine.now, machine.used_s, observer)
        self.front = ProcessorUse([ENGINE], proc=machine.proc)

    def beats(self, seconds: float, began_s: float | None) -> float:
        """Let the thread of the heartbeat send for so long. Returns the time until a hang was
        seen; infinity if none was."""
        machine = self._machine
        start = machine.now
        while machine.now - start < seconds:
            machine.move(INTERVAL_S)
            machine.wake(HEART, SOCKETS)
            machine.move(machine.load * SLICE_S)  # until the thread gets to run
            self.detector.heard()
            self.detector.beat(self.meter.beat(machine.now, machine.used_s, began_s))
            if self.detector.hang:
                return machine.now - start
        return math.inf

    def silence(self, seconds: float) -> float:
        """Let no message come for so long. Returns the same."""
        machine = self._machine
        start = machine.now
        while machine.now - start < seconds:
            machine.move(TICK_S)
            share = 1.0
            if self.detector.is_silent:
                use = self.front.look(TICK_S)
                share = 1.0 if use is None else use.share
            self.detector.tick(processor_share=share)
            if self.detector.hang:
                return machine.now - start
        return math.inf

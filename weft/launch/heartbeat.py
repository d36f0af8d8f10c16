"""The engine's heartbeat: twice a second, a thread reports how long the present step has run, and
for how long the engine has made no progress although nothing kept it from a processor.
`weft/client/engine_state.py` judges the reports.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import zmq

from weft.launch.processor_use import ProcessorUse, Use
from weft.messages.channel import Sender
from weft.messages.status import Heartbeat

INTERVAL_S = 0.5
# A beat that is later than this was delayed: the machine is busy, or the process was stopped.
LATE_S = 0.25
IDLE_SHARE = 0.02  # share of one processor: an engine that uses less only waits
LEAST_USED_S = 0.001  # processor time in an interval; threads that only send messages use less
# However busy the machine is, at least this part of an interval counts, so that a bound holds.
LEAST_COUNTED = 1 / 20


class Observer(Protocol):
    """What `ActivityMeter` needs of `ProcessorUse`."""

    def look(self, passed_s: float) -> Use | None: ...

    def forget(self) -> None: ...


class ActivityMeter:
    """Computes the content of each beat from readings of the clocks.

    A process that gets no processor computes as little as a process that waits for an event that
    does not come. So only the time counts for which no thread of the engine waited for a processor
    (or for a disk), and progress is measured against that time:

        passed   ├──────────────────────── 0.5 s ────────────────────────┤
        threads   run  wait for a processor                          run
        counts   ├───┤                                              ├────┤

    A thread that gets 1 % of a processor of a busy machine, and wants all of it, makes progress;
    one that takes as much of a free processor only wakes up now and then.
    """

    def __init__(self, now: float, used_s: float, observer: Observer) -> None:
        """`now`: the time. `used_s`: the processor time of the process without the thread of the
        heartbeat. Both in seconds. `observer` looks at the threads of the engine."""
        self._now = now
        self._used_s = used_s
        self._observer = observer
        self._began_s: float | None = None
        self._idle_s = 0.0

    def beat(self, now: float, used_s: float, began_s: float | None) -> Heartbeat:
        """`began_s`: time at which the present step began; None between steps."""
        passed_s = now - self._now
        used_in_it_s = used_s - self._used_s
        self._now = now
        self._used_s = used_s
        step_s = 0.0 if began_s is None else now - began_s
        if began_s != self._began_s:
            self._began_s = began_s
            self._idle_s = 0.0
        if used_in_it_s >= IDLE_SHARE * passed_s:
            self._idle_s = 0.0
            self._observer.forget()
        elif began_s is None:
            self._idle_s += passed_s
            self._observer.forget()
        else:
            # Looking at all threads costs more than reading a clock, so it is done only here.
            self._count(passed_s, used_in_it_s, self._observer.look(passed_s))
            self._idle_s = min(self._idle_s, step_s)  # without the time before the step
        return Heartbeat(step_s=step_s, idle_s=self._idle_s)

    def _count(self, passed_s: float, used_s: float, use: Use | None) -> None:
        """Add the part of an interval in a step that counts, or begin anew after progress."""
        free_s = passed_s
        if use is not None:
            free_s = passed_s - use.waited_s
            used_s = max(used_s, use.used_s)  # that of other processes, too
        elif passed_s > INTERVAL_S + LATE_S:
            free_s = 0.0
        free_s = max(free_s, LEAST_COUNTED * passed_s)
        if used_s >= max(IDLE_SHARE * free_s, LEAST_USED_S):
            self._idle_s = 0.0
        else:
            # A process that was stopped for an hour has waited for one interval.
            self._idle_s += min(free_s, INTERVAL_S)


class HeartbeatSender:
    """Sends beats from `start` on. The main thread marks the begin and the end of each step (`with
    heartbeat:`); it never waits for the thread of the heartbeat."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._context = context
        self._address = address
        self._began_s: float | None = None  # when the running step began; None: no step runs
        self._stopped = threading.Event()
        self._pids = [os.getpid()]
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def start(self, followers: Sequence[int] = ()) -> None:
        """`followers`: the ids of the processes that the steps of this one may wait for."""
        self._pids += followers
        self._thread.start()

    def stop(self) -> None:
        """End the thread. No beat is sent after this call."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> None:
        """Mark the begin of a step."""
        self._began_s = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        self._began_s = None

    def _run(self) -> None:
        sender = Sender(self._context, self._address)  # a socket belongs to one thread
        observer = ProcessorUse(self._pids, but=threading.get_native_id())
        meter = ActivityMeter(time.monotonic(), _used_by_others_s(), observer)
        while not self._stopped.wait(INTERVAL_S):
            sender.send(meter.beat(time.monotonic(), _used_by_others_s(), self._began_s))
        sender.close()


def _used_by_others_s() -> float:
    """Processor time of all threads of this process but the calling one."""
    return time.process_time() - time.thread_time()

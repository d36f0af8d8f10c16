"""The engine's heartbeat: twice a second, a thread reports how long the present step has run and
for how long the process has computed nothing. `weft/client/engine_state.py` judges the reports.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import zmq

from weft.launch.run_queue import RunQueue
from weft.messages.channel import Sender
from weft.messages.status import Heartbeat

INTERVAL_S = 0.5
# A beat that is later than this was delayed: the machine is busy, or the process was stopped.
LATE_S = 0.25
IDLE_SHARE = 0.02  # share of one processor: a process that uses less only waits


class ActivityMeter:
    """Computes the content of each beat from readings of the clocks.

    A process that gets no processor computes as little as a process that waits. But then one of its
    threads is runnable, or the beats themselves are late: such an interval is not counted.
    """

    def __init__(self, now: float, used_s: float) -> None:
        """`now` and `used_s`: the time and the processor time of the whole process, in seconds."""
        self._now = now
        self._used_s = used_s
        self._idle_s = 0.0

    def beat(
        self, now: float, used_s: float, began_s: float | None, is_queued: Callable[[], bool]
    ) -> Heartbeat:
        """`began_s`: time at which the present step began; None between steps. `is_queued` checks
        whether a thread is runnable."""
        passed_s = now - self._now
        used_in_it_s = used_s - self._used_s
        self._now = now
        self._used_s = used_s
        if used_in_it_s >= IDLE_SHARE * passed_s:
            self._idle_s = 0.0
        elif passed_s <= INTERVAL_S + LATE_S and not is_queued():
            self._idle_s += passed_s
        return Heartbeat(step_s=0.0 if began_s is None else now - began_s, idle_s=self._idle_s)


class HeartbeatSender:
    """Sends beats from `start` on. The main thread marks the begin and the end of each step (`with
    heartbeat:`); it never waits for the thread of the heartbeat."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._context = context
        self._address = address
        self._began_s: float | None = None  # when the running step began; None: no step runs
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def start(self) -> None:
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
        meter = ActivityMeter(time.monotonic(), time.process_time())
        others = RunQueue(os.getpid(), but=threading.get_native_id())
        while not self._stopped.wait(INTERVAL_S):
            sender.send(
                meter.beat(
                    time.monotonic(), time.process_time(), self._began_s, others.is_waited_in
                )
            )
        sender.close()

"""The engine's heartbeat: a thread that tells twice a second how long the present step has run, and
whether the process computes. `weft/client/engine_state.py` judges it.
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
# A beat that comes later was held up: the machine is busy, or the process was stopped.
LATE_S = 0.25
IDLE_SHARE = 0.02  # of one processor: a process that uses less only waits


class ActivityMeter:
    """What a beat tells, from readings of the clocks.

    A process that lacks a processor computes as little as one that waits for something. But then a
    thread of it wants to run, or the beats themselves are late: such an interval says nothing.
    """

    def __init__(self, now: float, used_s: float) -> None:
        """`now` and the processor time of the whole process, in seconds."""
        self._now = now
        self._used_s = used_s
        self._idle_s = 0.0

    def beat(
        self, now: float, used_s: float, began_s: float | None, is_queued: Callable[[], bool]
    ) -> Heartbeat:
        """`began_s`: when the present step has begun; None between steps.
        `is_queued` looks whether a thread wants to run.
        """
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
    """Beats from `start` on. The main thread says when a step begins and ends;
    it never waits for the other.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._context = context
        self._address = address
        self._began_s: float | None = None  # the step that runs
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No beat comes after this."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> None:
        """A step begins."""
        self._began_s = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        self._began_s = None

    def _run(self) -> None:
        sender = Sender(self._context, self._address)  # sockets belong to one thread
        meter = ActivityMeter(time.monotonic(), time.process_time())
        others = RunQueue(os.getpid(), but=threading.get_native_id())
        while not self._stopped.wait(INTERVAL_S):
            sender.send(
                meter.beat(
                    time.monotonic(), time.process_time(), self._began_s, others.is_waited_in
                )
            )
        sender.close()

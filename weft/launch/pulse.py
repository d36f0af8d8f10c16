"""The engine's heartbeat: a thread that tells twice a second how long the present step has run, and whether the process
computes. `weft/text/pulse.py` judges it.
"""

from __future__ import annotations

import threading
import time

import zmq

from weft.messages.channel import Sender
from weft.messages.control import Heartbeat

INTERVAL_S = 0.5
IDLE_SHARE = 0.02  # of one processor: a process that uses less only waits


class Heart:
    """Beats from `start` on. The main thread says when a step begins and ends; it never waits for the other."""

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
        idle_s, now, used_s = 0.0, time.monotonic(), time.process_time()
        while not self._stopped.wait(INTERVAL_S):
            before, used_before = now, used_s
            now, used_s = time.monotonic(), time.process_time()
            is_idle = used_s - used_before < IDLE_SHARE * (now - before)
            idle_s = idle_s + now - before if is_idle else 0.0
            began_s = self._began_s
            sender.send(Heartbeat(step_s=0.0 if began_s is None else now - began_s, idle_s=idle_s))
        sender.close()

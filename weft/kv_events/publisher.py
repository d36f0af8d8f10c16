"""Publishes the changes of the prefix cache with ZeroMQ, on its own thread.

    engine's thread   changes ─▶ publish ─▶ queue
    own thread        queue ─▶ mirror ─▶ events ─▶ PUB      topic, sequence number, payload
                      ROUTER: a sequence number ─▶ all batches from there on, or the whole tree

A subscriber that has missed a number asks the ROUTER for it. vLLM and SGLang answer with the
batches that they still keep. If the kept batches do not reach back far enough, this publisher
answers with one batch that begins with `AllBlocksCleared` and contains the whole tree, under the
number of the last published batch: one question brings any late subscriber up to date.

The first batch of an engine begins with `AllBlocksCleared`. Its number is the time of the engine's
start in microseconds, and each later batch has the next number. So numbers also rise over restarts:
a subscriber that has missed a restart sees a gap, asks, and gets the new engine's whole tree.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress

import zmq

from weft.config.kv_events import KvEventsConfig
from weft.kv_events.changes import Change, ChangeNotes
from weft.kv_events.stream import EventStream
from weft.observe.log import EventLog

STOP_S = 5.0  # time at the end to publish the queued changes

log = EventLog("kv-events")


class KvEventPublisher:
    """The `CacheEvents` of ZeroMQ, where its methods are described. For one thread."""

    is_on = True

    def __init__(self, config: KvEventsConfig, page_size: int) -> None:
        self._max_queue_size = config.max_queue_size
        self._notes = ChangeNotes()
        # The tree calls these methods of the log directly, without a call in between.
        self.inserted = self._notes.inserted
        self.split = self._notes.split
        self.trimmed = self._notes.trimmed
        self.removed = self._notes.removed
        self.emptied = self._notes.emptied
        self._queue: deque[list[Change]] = deque()
        self._wakeup, self._notify = os.pipe()
        os.set_blocking(self._notify, False)
        self._stream = EventStream(config, page_size)
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def start(self) -> None:
        """Open the sockets and start the thread. Raises SettingsError."""
        self._stream.open()
        self._thread.start()

    def stop(self) -> None:
        """Publish what is queued, and close the sockets."""
        self._is_stopped = True
        self._wake()
        self._thread.join(STOP_S)

    def publish(self) -> None:
        changes = self._notes.take()
        if changes:
            self._queue.append(changes)
            self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full: the thread is notified already
            os.write(self._notify, b"!")

    # The thread

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._wakeup, zmq.POLLIN)
            if self._stream.router is not None:
                poller.register(self._stream.router, zmq.POLLIN)
            self._serve(poller)
        except Exception as exc:
            # The engine goes on; its subscribers get no more events.
            log.error("kv_events_ended", reason=f"{type(exc).__name__}: {exc}")
        finally:
            self._stream.close()
            self._queue = deque(maxlen=0)  # drops later changes: no thread would take them

    def _serve(self, poller: zmq.Poller) -> None:
        while not self._is_stopped or self._queue:
            for ready, _ in poller.poll():
                if ready == self._wakeup:
                    os.read(self._wakeup, 1 << 16)
                else:
                    self._publish_queued()  # so that the answer contains all changes so far
                    self._stream.answer()
            self._publish_queued()

    def _publish_queued(self) -> None:
        if len(self._queue) > self._max_queue_size:
            # Too many for subscribers to follow one by one: they become one batch.
            self._stream.publish_snapshot(self._queue)
        while self._queue:
            self._stream.publish(self._queue.popleft())

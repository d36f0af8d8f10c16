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
import time
from collections import deque
from contextlib import suppress

import zmq

from weft.config.kv_events import FLAG, KvEventsConfig
from weft.config.options import SettingsError
from weft.kv_events.changes import Change, ChangeNotes
from weft.kv_events.mirror import CacheMirror
from weft.kv_events.wire import (
    END_OF_REPLAY,
    SEQUENCE_BYTES,
    CacheEvent,
    encode_batch,
    encode_sequence,
)
from weft.observe.log import EventLog

STOP_S = 5.0  # time at the end to publish the queued changes

log = EventLog("kv-events")


class KvEventPublisher:
    """The `CacheEvents` of ZeroMQ, where its methods are described. For one thread."""

    is_on = True

    def __init__(self, config: KvEventsConfig, page_size: int) -> None:
        self._config = config
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
        self._mirror = CacheMirror(page_size)
        self._topic = config.topic.encode()
        # The next sequence number. An engine publishes less than one batch per microsecond, so the
        # numbers of a later start are higher.
        self._next = time.time_ns() // 1_000
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def start(self) -> None:
        """Open the sockets and start the thread. Raises SettingsError."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._pub = self._open_pub()
            self._router = self._open_router()
        except SettingsError:
            self._context.destroy(linger=0)
            raise
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

    def _open_pub(self) -> zmq.Socket[bytes]:
        config = self._config
        socket = self._context.socket(zmq.PUB)
        socket.setsockopt(zmq.SNDHWM, config.hwm)
        socket.setsockopt(zmq.LINGER, 0)
        _open(socket, config.address, bind=config.binds)
        return socket

    def _open_router(self) -> zmq.Socket[bytes] | None:
        address = self._config.replay_endpoint
        if address is None:
            return None
        socket = self._context.socket(zmq.ROUTER)
        # A limit on memory, for a client that asks and does not read the answers.
        socket.setsockopt(zmq.SNDHWM, self._config.buffer_steps + 1)
        socket.setsockopt(zmq.LINGER, 0)
        _open(socket, address, bind=True)
        return socket

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._wakeup, zmq.POLLIN)
            if self._router is not None:
                poller.register(self._router, zmq.POLLIN)
            self._serve(poller)
        except Exception as exc:
            # The engine goes on; its subscribers get no more events.
            log.error("kv_events_ended", reason=f"{type(exc).__name__}: {exc}")
        finally:
            self._context.destroy(linger=0)
            self._queue = deque(maxlen=0)  # drops later changes: no thread would take them

    def _serve(self, poller: zmq.Poller) -> None:
        while not self._is_stopped or self._queue:
            for ready, _ in poller.poll():
                if ready == self._wakeup:
                    os.read(self._wakeup, 1 << 16)
                else:
                    self._answer()
            self._publish_queued()

    def _publish_queued(self) -> None:
        if len(self._queue) > self._config.max_queue_size:
            # Too many for subscribers to follow one by one: they become one batch.
            while self._queue:
                self._mirror.apply(self._queue.popleft())
            self._send(self._mirror.whole())
        while self._queue:
            events = self._mirror.apply(self._queue.popleft())
            if events:
                self._send(events)

    def _send(self, events: list[CacheEvent]) -> None:
        payload = self._payload(events)
        number = self._next
        self._next += 1
        self._kept.append((number, payload))
        self._pub.send_multipart([self._topic, encode_sequence(number), payload])

    def _payload(self, events: list[CacheEvent]) -> bytes:
        return encode_batch(
            events,
            unix_s=time.time(),
            rank=self._config.data_parallel_rank,
            encoding=self._config.encoding,
        )

    def _answer(self) -> None:
        """Answer a question: all batches from a number on, then `END_OF_REPLAY`."""
        assert self._router is not None
        frames = self._router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != SEQUENCE_BYTES:
            log.seldom("kv_events_question", frames=len(frames))
            return
        asker, empty, number = frames
        self._publish_queued()  # so that the answer contains all changes so far
        first = int.from_bytes(number, "big")
        for sequence, payload in [*self._from(first), (None, b"")]:
            named = END_OF_REPLAY if sequence is None else encode_sequence(sequence)
            with suppress(zmq.Again):
                self._router.send_multipart([asker, empty, named, payload], zmq.NOBLOCK)

    def _from(self, first: int) -> list[tuple[int, bytes]]:
        """The batches from number `first` on; if some are not kept any more, the whole tree."""
        if first >= self._next:
            return []
        if self._kept and self._kept[0][0] <= first:
            return [batch for batch in self._kept if batch[0] >= first]
        return [(self._next - 1, self._payload(self._mirror.whole()))]


def _open(socket: zmq.Socket[bytes], address: str, *, bind: bool) -> None:
    try:
        if bind:
            socket.bind(address)
        else:
            socket.connect(address)
    except zmq.ZMQError as exc:
        verb = "listen on" if bind else "connect to"
        raise SettingsError(f"{FLAG}: cannot {verb} {address}: {exc.strerror}") from exc

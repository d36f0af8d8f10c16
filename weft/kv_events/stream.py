"""The events of the prefix cache as numbered batches, and the sockets of subscribers: PUB for all
batches, ROUTER for those that a subscriber has missed."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress

import zmq

from weft.config.kv_events import FLAG, KvEventsConfig
from weft.config.options import SettingsError
from weft.kv_events.changes import Change
from weft.kv_events.mirror import CacheMirror
from weft.kv_events.wire import (
    END_OF_REPLAY,
    SEQUENCE_BYTES,
    CacheEvent,
    encode_batch,
    encode_sequence,
)
from weft.observe.log import EventLog

log = EventLog("kv-events")


class EventStream:
    """Used by one thread, after `open`. An end of the context closes both sockets."""

    def __init__(self, config: KvEventsConfig, page_size: int) -> None:
        self._config = config
        self._mirror = CacheMirror(page_size)
        self._topic = config.topic.encode()
        # The next sequence number. An engine publishes less than one batch per microsecond, so the
        # numbers of a later start are higher.
        self._next = time.time_ns() // 1_000
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)

    def open(self) -> None:
        """Open the sockets. Raises SettingsError."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._pub = self._open_pub()
            self.router = self._open_router()
        except SettingsError:
            self.close()
            raise

    def close(self) -> None:
        self._context.destroy(linger=0)

    def publish(self, changes: list[Change]) -> None:
        """Publish the changes of a step."""
        events = self._mirror.apply(changes)
        if events:
            self._send(events)

    def publish_snapshot(self, missed: deque[list[Change]]) -> None:
        """Publish the whole tree, after changes that nobody could follow one by one."""
        while missed:
            self._mirror.apply(missed.popleft())
        self._send(self._mirror.snapshot())

    def answer(self) -> None:
        """Answer a question: all batches from a number on, then `END_OF_REPLAY`."""
        assert self.router is not None
        frames = self.router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != SEQUENCE_BYTES:
            log.seldom("kv_events_question", frames=len(frames))
            return
        asker, empty, number = frames
        first = int.from_bytes(number, "big")
        for sequence, payload in [*self._from(first), (None, b"")]:
            named = END_OF_REPLAY if sequence is None else encode_sequence(sequence)
            with suppress(zmq.Again):
                self.router.send_multipart([asker, empty, named, payload], zmq.NOBLOCK)

    def _from(self, first: int) -> list[tuple[int, bytes]]:
        """The batches from number `first` on; if some are not kept any more, the whole tree."""
        if first >= self._next:
            return []
        if self._kept and self._kept[0][0] <= first:
            return [batch for batch in self._kept if batch[0] >= first]
        return [(self._next - 1, self._payload(self._mirror.snapshot()))]

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


def _open(socket: zmq.Socket[bytes], address: str, *, bind: bool) -> None:
    try:
        if bind:
            socket.bind(address)
        else:
            socket.connect(address)
    except zmq.ZMQError as exc:
        verb = "listen on" if bind else "connect to"
        raise SettingsError(f"{FLAG}: cannot {verb} {address}: {exc.strerror}") from exc

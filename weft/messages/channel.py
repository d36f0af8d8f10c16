"""Typed ends of the ZeroMQ sockets between the front and the engine.

One PUSH/PULL pair in each direction, on `ipc` sockets in a private folder. An end that receives drops what is no
message, and counts it: whatever arrives on a socket, nobody is harmed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import zmq
import zmq.asyncio

from weft.messages.codec import BadMessage, Message, encode

M = TypeVar("M")
MAX_MESSAGE_BYTES = 256 << 20


def _open(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, bind: bool) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    if bind:
        socket.bind(address)
    else:
        socket.connect(address)
    return socket


class Sender:
    """The sending end. Never blocks: messages queue without bound, flow control is the receiver's queue limit."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, *, bind: bool = False) -> None:
        self._socket = _open(context, zmq.PUSH, address, bind)

    def send(self, message: Message) -> None:
        self._socket.send(encode(message), copy=True)

    def close(self, linger_s: float = 0.0) -> None:
        self._socket.close(linger=int(linger_s * 1000))


class Receiver(Generic[M]):
    """The receiving end of a synchronous process (the engine)."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        decode: Callable[[bytes], M],
        *,
        bind: bool = False,
    ) -> None:
        self._socket = _open(context, zmq.PULL, address, bind)
        self._decode = decode
        self.num_dropped = 0

    def drain(self, limit: int = 1_024) -> list[M]:
        """The messages that have arrived, at most `limit`, without waiting."""
        messages: list[M] = []
        while len(messages) < limit:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                messages.append(self._decode(data))
            except BadMessage:
                self.num_dropped += 1
        return messages

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something has arrived, at most `timeout_s`. True if something has."""
        return bool(self._socket.poll(int(timeout_s * 1000)))

    def close(self) -> None:
        self._socket.close(linger=0)


class AsyncReceiver(Generic[M]):
    """The receiving end of an asyncio process (the front)."""

    def __init__(
        self, context: zmq.asyncio.Context, address: str, decode: Callable[[bytes], M], *, bind: bool = False
    ) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        if bind:
            self._socket.bind(address)
        else:
            self._socket.connect(address)
        self._decode = decode
        self.num_dropped = 0

    async def receive(self) -> M:
        """The next message."""
        while True:
            data = await self._socket.recv()
            try:
                return self._decode(data)
            except BadMessage:
                self.num_dropped += 1

    def close(self) -> None:
        self._socket.close(linger=0)

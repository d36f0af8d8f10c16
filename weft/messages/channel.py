"""Typed ends of the ZeroMQ sockets between front and engine, and of the engine's RPC socket.

One PUSH/PULL pair in each direction, and a ROUTER to which any number of RPC clients connect, on
`ipc` sockets in a private folder. A receiving end drops and counts data that is not a message, so
no data on a socket can do harm. This module does not know the meaning of messages.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from weft.messages.beside import put_values, take_values
from weft.messages.calls import ControlReply, ControlRequest
from weft.messages.codec import (
    BadMessage,
    Message,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from weft.messages.wakeup import WakeupPipe

M = TypeVar("M")
MAX_MESSAGE_BYTES = 512 << 20  # of a message, and of each frame beside it
FIRST_PEER_MS = 2_000  # time for the connection of a running peer
MAX_RPC_BYTES = 1 << 20  # of a call
# An engine's process may look for the front's socket before the front has made it.
LOOK_AGAIN_MS = 5


def _open(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    address: str,
    bind: bool,
    max_bytes: int = MAX_MESSAGE_BYTES,
) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.RECONNECT_IVL, LOOK_AGAIN_MS)
    if bind:
        socket.bind(address)
    else:
        socket.connect(address)
    return socket


class Sender:
    """The sending end. It does not block.

    Its queue of messages is unbounded: the limits of the receiver's own queue control the flow.

    Only the first message may wait for the peer's connection. Later messages to a peer that has
    ended are dropped and counted: the peer does not come back, and the watcher of the other process
    ends the calls that wait for its answers. So are those after `close`: a server that ends has
    closed its sockets before the last client that leaves is noticed.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, *, bind: bool = False
    ) -> None:
        self._socket = _open(context, zmq.PUSH, address, bind)
        self._has_met = False  # the peer was connected once
        self.num_unsent = 0

    def send(self, message: Message) -> None:
        if self._socket.closed:
            self.num_unsent += 1
            return
        if not self._has_met:
            self._has_met = bool(self._socket.poll(FIRST_PEER_MS, zmq.POLLOUT))
        message, values = take_values(message)
        try:
            if values:  # the values are sent without a copy
                self._socket.send_multipart([encode(message), *values], zmq.NOBLOCK, copy=False)
            else:
                self._socket.send(encode(message), zmq.NOBLOCK, copy=True)
        except zmq.Again:
            self.num_unsent += 1

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
            beside: list[bytes] = []
            if self._socket.getsockopt(zmq.RCVMORE):
                beside = self._socket.recv_multipart()
            try:
                message = self._decode(data)
                if beside:
                    message = put_values(message, beside)
                messages.append(message)
            except BadMessage:
                self.num_dropped += 1
        return messages

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a message has arrived, at most `timeout_s`. True if one has."""
        return bool(self._socket.poll(int(timeout_s * 1000)))

    def close(self) -> None:
        self._socket.close(linger=0)


class RpcSocket:
    """The engine's end of RPC: any number of clients connect, each gets the replies to its calls.

    Every client numbers its own calls. Inside the engine such a call gets a number below 0, which
    no call of the front has; `send` restores the client and its number.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = _open(context, zmq.ROUTER, address, True, MAX_RPC_BYTES)
        self._open: dict[int, tuple[bytes, int]] = {}  # by our number: client and its number
        self._last = 0  # the number of the last call
        self.num_dropped = 0

    def drain(self, limit: int) -> list[ControlRequest[Any]]:
        """The calls that have arrived, at most `limit`, without waiting."""
        calls: list[ControlRequest[Any]] = []
        for _ in range(limit):
            try:
                client, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            call = _decoded(parts)
            if call is None:
                self.num_dropped += 1
                continue
            self._last -= 1
            self._open[self._last] = (client, call.call)
            calls.append(msgspec.structs.replace(call, call=self._last))
        return calls

    def send(self, reply: ControlReply) -> None:
        """Send a reply to the client that called. If the client has ended, the reply is dropped."""
        client, number = self._open.pop(reply.call)
        answer = msgspec.structs.replace(reply, call=number)
        self._socket.send_multipart([client, encode(answer)])

    def close(self, linger_s: float = 0.0) -> None:
        self._socket.close(linger=int(linger_s * 1000))


def _decoded(parts: list[bytes]) -> ControlRequest[Any] | None:
    if len(parts) != 1:
        return None
    try:
        message = decode_to_engine(parts[0])
    except BadMessage:
        return None
    if not isinstance(message, ControlRequest):
        return None
    return message


class RpcCaller:
    """The client's end of RPC: one call at a time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = _open(context, zmq.DEALER, address, False)
        self._num_calls = 0

    def call(self, message: ControlRequest[Any], timeout_s: float) -> ControlReply | None:
        """Send a request, and wait for its reply, which may be a `CallFailed`; None if none comes
        within `timeout_s`."""
        self._num_calls += 1
        self._socket.send(encode(msgspec.structs.replace(message, call=self._num_calls)))
        while self._socket.poll(int(timeout_s * 1000)):
            reply = decode_from_engine(self._socket.recv())
            if isinstance(reply, ControlReply) and reply.call == self._num_calls:
                return reply
        return None

    def close(self) -> None:
        self._socket.close(linger=0)


class Sleeper:
    """Sleeps until a message has arrived at one of several receiving ends."""

    def __init__(self, *ends: Receiver[M] | RpcSocket | WakeupPipe) -> None:
        self._poller = zmq.Poller()
        self._wakeups = [end for end in ends if isinstance(end, WakeupPipe)]
        for end in ends:
            self._poller.register(end._socket, zmq.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Sleep at most `timeout_s`, rounded up to milliseconds. True if a message has arrived."""
        came = bool(self._poller.poll(math.ceil(timeout_s * 1000)))
        for wakeup in self._wakeups:
            wakeup.drain()
        return came


class AsyncReceiver(Generic[M]):
    """The receiving end of an asyncio process (the front).

    It belongs to the event loop that is running when it is created.

    It reads the socket directly, and the loop watches the socket's descriptor: zmq.asyncio makes
    several futures per message and reads the socket's state four times, which is much work for
    messages with only a few tokens.
    """

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
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._loop.add_reader(self._socket.fileno(), self._arrived)
        self.num_dropped = 0

    async def receive(self) -> M:
        """Wait for the next message. Only one task may wait."""
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                # All reported messages are read: the descriptor reports the next one.
                self._waiter = self._loop.create_future()
                await self._waiter
                continue
            try:
                return self._decode(data)
            except BadMessage:
                self.num_dropped += 1

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=0)

    def _arrived(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

"""Receives messages from the front and from the RPC socket, and sends replies to their senders.

    front  ─▶ Intake.recv_requests ─▶ Engine ─▶ Intake.send ─▶ front
    RPC    ─▶                                       └────────▶ RPC, if the call came from there

No call waits, and one call receives a limited number of messages. Intake knows neither sockets nor
the meaning of messages: the two sources are arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from weft.messages.calls import ControlReply, ControlRequest
from weft.messages.codec import FromEngine, ToEngine
from weft.messages.status import UnreadableMessages
from weft.messages.weights import WeightsReply
from weft.observe.log import EventLog

# A message takes 50 to 100 µs, so many messages delay running requests by about 10 ms per step; the
# rest is received in the next step.
MAX_RECV_PER_POLL = 128

log = EventLog("intake")


class MessageSource(Protocol):
    """The socket of the front: `messages.channel.Receiver`."""

    num_dropped: int

    def drain(self, limit: int) -> list[ToEngine]: ...


class CallSource(Protocol):
    """The RPC socket for any number of clients: `messages.channel.RpcSocket`.

    Its calls have negative numbers, by which `send` finds the client.
    """

    num_dropped: int

    def drain(self, limit: int) -> list[ControlRequest[Any]]: ...

    def send(self, reply: ControlReply) -> None: ...


class Intake:
    """`send` takes replies to the front, and all messages that are not replies."""

    def __init__(
        self,
        front: MessageSource,
        send: Callable[[FromEngine], None],
        rpc: CallSource | None = None,
    ) -> None:
        self._send = send
        self._front = front
        self._rpc = rpc
        self._num_dropped = 0  # dropped messages that have been reported

    def recv_requests(self) -> list[ToEngine]:
        """The messages that have come, RPC calls first: at most `MAX_RECV_PER_POLL` of each
        source."""
        messages: list[ToEngine] = []
        if self._rpc is not None:
            messages += self._rpc.drain(MAX_RECV_PER_POLL)
        messages += self._front.drain(MAX_RECV_PER_POLL)
        num_dropped = self._newly_dropped()
        if num_dropped:
            messages.append(UnreadableMessages(num=num_dropped))
        return messages

    def send(self, message: FromEngine) -> None:
        """Send a reply to the sender of its request, and everything else to the front."""
        if self._rpc is None or not isinstance(message, ControlReply) or message.call >= 0:
            self._send(message)
            return
        self._rpc.send(message)
        # The front tells clients which weights are in use, even if an RPC client has changed them.
        if isinstance(message, WeightsReply):
            self._send(message)

    def _newly_dropped(self) -> int:
        """Number of unreadable messages since the last call."""
        total = self._front.num_dropped
        if self._rpc is not None:
            total += self._rpc.num_dropped
        num = total - self._num_dropped
        self._num_dropped = total
        if num:
            log.seldom("unreadable_messages", total=total)
        return num

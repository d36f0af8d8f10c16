"""Taking messages in, from the front and from the RPC socket, and sending replies to the sender.

    front  ─▶ Intake.recv_requests ─▶ Engine ─▶ Intake.send ─▶ front
    RPC    ─▶          │                            └────────▶ RPC, if the call came from there
                       └─ not in every step, if `--recv-interval` says so (RecvSkipper)

No call waits, and one call takes in a limited number of messages. Intake knows neither sockets nor
what messages mean: the two sources are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from weft.messages.calls import ControlReply, ControlRequest
from weft.messages.codec import FromEngine, ToEngine
from weft.messages.status import UnreadableMessages
from weft.messages.weights import WeightsReply
from weft.observe.log import EventLog
from weft.plan.step import ForwardMode

# A message takes 50 to 100 µs, so a flood of them delays the running requests by some 10 ms a step;
# the rest is taken in at the next step.
MAX_RECV_PER_POLL = 128

log = EventLog("intake")


class MessageSource(Protocol):
    """The socket of the front: `messages.channel.Receiver`."""

    num_dropped: int

    def drain(self, limit: int) -> list[ToEngine]: ...


class CallSource(Protocol):
    """The RPC socket, to which any number of clients connect: `messages.channel.RpcSocket`.

    Its calls have numbers below 0, by which `send` finds the client.
    """

    num_dropped: int

    def drain(self, limit: int) -> list[ControlRequest[Any]]: ...

    def send(self, reply: ControlReply) -> None: ...


class RecvSkipper:
    """Whether to look for messages in this step.

    Each step counts by its mode (`weights`, 1 for a mode without a weight); it is time when the sum
    reaches `interval`. Looking costs little, but a larger interval leaves steps undisturbed.
    Without a running step there is nothing to disturb: then it is always time.
    """

    def __init__(self, interval: int = 1, weights: Mapping[ForwardMode, int] | None = None) -> None:
        self._interval = interval
        self._weights = dict(weights or {})
        self._counted = 0

    def handle(self, last_mode: ForwardMode | None) -> bool:
        """`last_mode`: what the last step ran; None if nothing."""
        if last_mode is None:
            self._counted = 0
            return True
        self._counted += self._weights.get(last_mode, 1)
        if self._counted < self._interval:
            return False
        self._counted = 0
        return True


class Intake:
    """`send` takes replies to the front, and everything that is no reply."""

    def __init__(
        self,
        front: MessageSource,
        send: Callable[[FromEngine], None],
        rpc: CallSource | None = None,
        skipper: RecvSkipper | None = None,
    ) -> None:
        self._send = send
        self._front = front
        self._rpc = rpc
        self._skipper = skipper or RecvSkipper()
        self._num_dropped = 0  # that have been reported

    def recv_requests(self, last_mode: ForwardMode | None = None) -> list[ToEngine]:
        """The messages that have come, RPC calls first.

        At most `MAX_RECV_PER_POLL` of each source, and nothing if it is not time.
        """
        if not self._skipper.handle(last_mode):
            return []
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
        # The front tells its clients which weights are in use, also if an RPC client has changed
        # them.
        if isinstance(message, WeightsReply):
            self._send(message)

    def _newly_dropped(self) -> int:
        """Messages that could not be read since the last time."""
        total = self._front.num_dropped
        if self._rpc is not None:
            total += self._rpc.num_dropped
        num = total - self._num_dropped
        self._num_dropped = total
        if num:
            log.seldom("unreadable_messages", total=total)
        return num

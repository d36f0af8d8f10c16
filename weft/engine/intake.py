"""Taking messages in: from the front and from the RPC socket, without waiting, so many at a time, or only every few
steps.

    front  ─▶ Intake.recv_requests ─▶ Engine.submit ─▶ reply to whoever sent the message
    RPC    ─▶          └─ not in every step, if `--recv-interval` says so (RecvSkipper)

It knows neither sockets nor what messages mean: the two sources are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from weft.messages.codec import FromEngine, ToEngine
from weft.messages.flow import Dropped, Rpc
from weft.observe.log import EventLog
from weft.plan.step import ForwardMode

# A message costs 50 to 100 µs to take in, so a flood of them holds up the running requests by some 10 ms a step;
# what is left over is taken in at the next step.
MAX_RECV_PER_POLL = 128

log = EventLog("intake")

Answer = Callable[[FromEngine], None]


class Received(NamedTuple):
    """A message, and where its reply goes."""

    message: ToEngine
    answer: Answer


class Front(Protocol):
    """The socket of the front: `messages.channel.Receiver`."""

    num_dropped: int

    def drain(self, limit: int) -> list[ToEngine]: ...


class RpcClients(Protocol):
    """The RPC socket, to which any number of clients connect: `messages.channel.RpcSocket`. Each call comes with a
    function that answers it."""

    num_dropped: int

    def drain(self, limit: int) -> list[tuple[Rpc, Answer]]: ...


class RecvSkipper:
    """Whether to look for messages in this step. Each step counts by its mode (`weights`, 1 for a mode without); after
    `interval` it is time. Looking costs little, but whoever wants steps undisturbed can make it rare.

    Where nothing runs there is nothing to disturb: then it is always time.
    """

    def __init__(self, interval: int = 1, weights: Mapping[ForwardMode, int] | None = None) -> None:
        self._interval = interval
        self._weights = dict(weights or {})
        self._counted = 0

    def handle(self, last_mode: ForwardMode | None) -> bool:
        """`last_mode`: what the last step ran; None if nothing."""
        self._counted += self._interval if last_mode is None else self._weights.get(last_mode, 1)
        if self._counted < self._interval:
            return False
        self._counted = 0
        return True


class Intake:
    """`send` is where replies to the front go, and everything that nobody has asked for."""

    def __init__(
        self,
        front: Front,
        send: Answer,
        rpc: RpcClients | None = None,
        skipper: RecvSkipper | None = None,
    ) -> None:
        self.send = send
        self._front = front
        self._rpc = rpc
        self._skipper = skipper or RecvSkipper()
        self._num_dropped = 0  # that has been told

    def recv_requests(self, last_mode: ForwardMode | None = None) -> list[Received]:
        """What has come, RPC calls first; at most `MAX_RECV_PER_POLL` of each source, and nothing if it is not time."""
        if not self._skipper.handle(last_mode):
            return []
        received: list[Received] = []
        if self._rpc is not None:
            received += [Received(*call) for call in self._rpc.drain(MAX_RECV_PER_POLL)]
        received += [
            Received(message, self.send) for message in self._front.drain(MAX_RECV_PER_POLL)
        ]
        return [*received, *self._dropped()]

    def _dropped(self) -> list[Received]:
        """A message about those that could not be read since the last one, if there are any."""
        total = self._front.num_dropped + (self._rpc.num_dropped if self._rpc is not None else 0)
        num, self._num_dropped = total - self._num_dropped, total
        if not num:
            return []
        log.seldom("unreadable_messages", total=total)
        return [Received(Dropped(num=num), self.send)]

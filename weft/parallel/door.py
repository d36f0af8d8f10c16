"""The connection between the nodes of one model: the messages, and the sockets for them.

    node 1 ── Greeting ──▶ node 0   one TCP port, ZeroMQ with CURVE
                      ◀─ NodeWelcome ─         settings, and ports from which the node's ranks get
                      plans
                      ◀─ Serving ─────         all ranks have loaded
                      ◀── NodeBeat ──▶         twice a second: a silent node is considered lost
                      ── LostRank ───▶
                      ◀─ Farewell ────
           ── Parting ────▶

All keys are derived from one secret (`keys_of`). The public key of node 0 is never sent, and no
handshake begins without it; so a client without the secret can only open a connection. Messages are
typed msgpack. This module imports no torch, because a node waits here before it loads anything.
"""

from __future__ import annotations

import hashlib
import socket as sockets
from typing import NamedTuple, TypeAlias

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

BEAT_S = 0.5
# Without a word for so long, a node is gone. While weights are loaded, threads of Python wait for
# each other.
SILENT_S = 3.0
SILENT_WHILE_LOADING_S = 10.0
MAX_MESSAGE_BYTES = 1 << 20
LINGER_MS = 1_000
POLL_MS = 100
SALT = b"weft: the nodes of one model"
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
ZmqContext: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
ZmqSocket: TypeAlias = "zmq.Socket[bytes]"


class Greeting(msgspec.Struct, frozen=True, tag=True):
    """The first message of a node."""

    node: int
    facts: dict[str, str]  # facts that must be equal on all nodes, by their names in errors
    settings: bytes  # the `EngineConfig` that the node was given, as JSON


class NodeWelcome(msgspec.Struct, frozen=True, tag=True):
    """The node is accepted."""

    settings: bytes  # the `EngineConfig` of node 0, resolved, as JSON
    plans: list[int]  # ports from which the ranks of the node get their plans
    store: int  # port at which all ranks meet


class NodeDeclined(msgspec.Struct, frozen=True, tag=True):
    """The node is refused."""

    reason: str


class Serving(msgspec.Struct, frozen=True, tag=True):
    """The sender is alive, and all ranks have loaded."""


class NodeBeat(msgspec.Struct, frozen=True, tag=True):
    """The sender is alive."""


class LostRank(msgspec.Struct, frozen=True, tag=True):
    """A rank of the sender has ended, or its node ends."""

    reason: str


class Farewell(msgspec.Struct, frozen=True, tag=True):
    """Node 0 ends. `reason`: why; empty if it was asked to."""

    reason: str


class Parting(msgspec.Struct, frozen=True, tag=True):
    """The answer to a farewell, without which a closing connection might lose the farewell."""


Word: TypeAlias = (
    Greeting | NodeWelcome | NodeDeclined | Serving | NodeBeat | LostRank | Farewell | Parting
)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Word)


class CurveKey(NamedTuple):
    public: bytes
    secret: bytes


class CurveKeys(NamedTuple):
    """The keys of node 0, which listens, and of all other nodes."""

    listener: CurveKey
    caller: CurveKey


class DoorError(Exception):
    """The address cannot be used; the message says why."""


def keys_of(secret: str) -> CurveKeys:
    """The keys derived from a secret. Slow on purpose: a tenth of a second for each guess."""
    data = hashlib.scrypt(
        secret.encode("utf-8", "surrogatepass"),
        salt=SALT,
        n=1 << 15,
        r=8,
        p=1,
        maxmem=1 << 26,
        dklen=64,
    )
    return CurveKeys(_key(data[:32]), _key(data[32:]))


def _key(data: bytes) -> CurveKey:
    secret = z85.encode(data)
    return CurveKey(zmq.curve_public(secret), secret)


def listening(context: ZmqContext, kind: int, keys: CurveKeys) -> ZmqSocket:
    """A socket of node 0, before it is bound."""
    socket = context.socket(kind)
    _limit(socket)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.listener.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.listener.secret)
    return socket


def calling(context: ZmqContext, keys: CurveKeys) -> ZmqSocket:
    """A socket of another node, before it is connected."""
    socket = context.socket(zmq.DEALER)
    _limit(socket)
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.listener.public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.caller.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.caller.secret)
    return socket


def _limit(socket: ZmqSocket) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.IPV6, 1)
    # Messages to a peer that is not connected yet would be lost with it.
    socket.setsockopt(zmq.IMMEDIATE, 1)


def address(host: str, port: int) -> str:
    """The address in the format of ZeroMQ."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def resolved(host: str) -> str:
    """The numeric address of a host, of the same family on all nodes. Raises DoorError."""
    try:
        found = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise DoorError(f"{host[:200]!r} is not a known host") from exc
    # IPv4 first, because only some nodes may have an IPv6 address for a name.
    found.sort(key=lambda one: one[0] != sockets.AF_INET)
    return str(found[0][4][0])


def bind(socket: ZmqSocket, host: str, port: int = 0) -> int:
    """Listen on an address of this machine; port 0 selects a free port. Returns the port. Raises
    DoorError."""
    try:
        if port:
            socket.bind(address(host, port))
            return port
        return socket.bind_to_random_port(address(host, 0).rpartition(":")[0])
    except zmq.ZMQError as exc:
        raise DoorError(f"cannot listen on {host}:{port}: {exc.strerror}") from exc


class Heard(NamedTuple):
    """A received message and its sender."""

    peer: bytes
    word: Word


class Door:
    """The side of node 0. Used by one thread at a time."""

    def __init__(self, context: ZmqContext, keys: CurveKeys, host: str, port: int) -> None:
        """Raises DoorError if it cannot listen."""
        self._socket = listening(context, zmq.ROUTER, keys)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._monitor = self._socket.get_monitor_socket(HANDSHAKE_FAILED)
        self.num_strangers = 0  # connections without the secret
        bind(self._socket, host, port)

    def hear(self) -> Heard | None:
        """The next message; None if none comes in time."""
        self.num_strangers += _num_events(self._monitor)
        if not self._socket.poll(POLL_MS):
            return None
        peer, *frames = self._socket.recv_multipart()
        word = _word(frames)
        return None if word is None else Heard(peer, word)

    def say(self, peer: bytes, word: Word) -> None:
        """Send a message. It is dropped if the peer is gone."""
        self._socket.send_multipart([peer, _encoder.encode(word)])

    def close(self) -> None:
        """Close; messages in the queue are still sent."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()


class DoorClosed(Exception):
    """The connection to node 0 is lost."""


class DoorLocked(DoorClosed):
    """Node 0 refuses this node."""


class DoorCaller:
    """The side of another node. Used by one thread."""

    def __init__(self, context: ZmqContext, keys: CurveKeys, host: str, port: int) -> None:
        """Connect, and keep trying until node 0 listens."""
        self._socket = calling(context, keys)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        events = HANDSHAKE_FAILED | zmq.EVENT_DISCONNECTED
        self._monitor = self._socket.get_monitor_socket(events)
        self._where = f"{host}:{port}"
        try:
            self._socket.connect(address(host, port))
        except zmq.ZMQError as exc:
            raise DoorClosed(f"--dist-init-addr {self._where}: {exc.strerror}") from exc

    def say(self, word: Word) -> bool:
        """Send a message. Returns False if node 0 is not connected."""
        try:
            self._socket.send(_encoder.encode(word), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def hear(self) -> Word | None:
        """The next message; None if none comes in time. Raises DoorClosed, DoorLocked."""
        if self._socket.poll(POLL_MS):
            return _word(self._socket.recv_multipart())
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event & HANDSHAKE_FAILED:
                raise DoorLocked(
                    f"node 0 at {self._where} refuses this node: it has another secret "
                    "(WEFT_DIST_SECRET), or is not a weft server"
                )
            if self._socket.poll(0):
                return _word(self._socket.recv_multipart())  # its last message
            raise DoorClosed(f"the connection to node 0 at {self._where} broke")
        return None

    def close(self) -> None:
        """Close; messages in the queue are still sent."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()


def _word(frames: list[bytes]) -> Word | None:
    """The message; None for invalid bytes."""
    if len(frames) != 1:
        return None
    try:
        word: Word = _decoder.decode(frames[0])
    except msgspec.DecodeError:
        return None
    return word


def _num_events(monitor: ZmqSocket) -> int:
    found = 0
    while monitor.poll(0):
        recv_monitor_message(monitor)
        found += 1
    return found


class Silence:
    """Whether a peer has been silent for too long. If this machine was suspended, it could not
    receive either: after a late tick the count begins again."""

    def __init__(self, now_s: float) -> None:
        self._last_s = now_s
        self._num_ticks = 0

    def heard(self) -> None:
        self._num_ticks = 0

    def tick(self, now_s: float, limit_s: float) -> bool:
        """Call it once every `BEAT_S`. Returns whether the peer has been silent for `limit_s`."""
        if now_s - self._last_s > 2 * BEAT_S:
            self._num_ticks = 0
        self._last_s = now_s
        self._num_ticks += 1
        return self._num_ticks * BEAT_S > limit_s

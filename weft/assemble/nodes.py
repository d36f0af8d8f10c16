"""The other nodes that hold a model together with this one, as node 0 sees them (`--nnodes`).

    node 1: greets ─▶ node 0 compares facts and settings ─▶ welcome, or the reason why not
            its ranks connect, each to its own socket, and load while node 0 loads
            sends beats, and reports a lost rank ─▶ node 0 watches on a thread

Until all nodes have come, the caller's thread uses the door; afterwards, the watching thread does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Mapping

import msgspec
import zmq

from weft.assemble.node_facts import difference
from weft.config.engine import EngineConfig
from weft.config.model import ModelError
from weft.config.nodes import address_of, ranks_of, said_otherwise
from weft.config.options import SettingsError
from weft.observe.log import EventLog
from weft.parallel.comm import listening_store
from weft.parallel.door import (
    BEAT_S,
    SILENT_S,
    SILENT_WHILE_LOADING_S,
    CurveKeys,
    Door,
    DoorError,
    Farewell,
    Greeting,
    Heard,
    LostRank,
    NodeBeat,
    NodeDeclined,
    NodeWelcome,
    Parting,
    Serving,
    Silence,
    ZmqContext,
    bind,
    keys_of,
    listening,
    resolved,
)
from weft.parallel.links import Loss, NodeLink

FAREWELL_S = 1.0  # time for all nodes to answer the farewell
LEAVE_S = FAREWELL_S + BEAT_S / 2  # time for the watching thread to send it and get the answers

log = EventLog("engine")


class NodeMissing(ModelError):
    """A node did not come, or could not stay."""


class NodeTerms:
    """The settings and facts that all nodes must have in common."""

    def __init__(self, config: EngineConfig, facts: dict[str, str]) -> None:
        self.config = config
        self._facts = facts

    def refusal(self, greeting: Greeting, come: Container[int]) -> str:
        """The reason to decline a node; "" if it is accepted. `come`:
        the nodes that are here already."""
        node = greeting.node
        different = difference(self._facts, greeting.facts)
        if different:
            return different
        try:
            theirs = msgspec.json.decode(greeting.settings, type=EngineConfig)
        except msgspec.DecodeError:
            return "its settings cannot be read"
        different = said_otherwise(theirs, self.config)
        if different:
            return different
        if not 0 < node < self.config.nnodes:
            return f"--node-rank is {node}; node 0 waits for 1 to {self.config.nnodes - 1}"
        if node in come:
            return f"--node-rank is {node}, and a node with this number has joined already"
        return ""


class NodePeers:
    """The nodes that have come: where each is at the door, and how long it has been silent."""

    def __init__(self) -> None:
        self.by_node: dict[int, bytes] = {}
        self._silences: dict[int, Silence] = {}
        self._next_beat_s = 0.0

    def __len__(self) -> int:
        return len(self.by_node)

    def add(self, node: int, peer: bytes) -> None:
        self.by_node[node] = peer
        self._silences[node] = Silence(time.monotonic())

    def heard(self, peer: bytes) -> bool:
        """Note a sign of life. Returns whether it is from a node that has come."""
        for node, known in self.by_node.items():
            if peer == known:
                self._silences[node].heard()
                return True
        return False

    def beat_is_due(self, now_s: float) -> bool:
        """Whether it is time for the next beat, which is sent then."""
        if now_s < self._next_beat_s:
            return False
        self._next_beat_s = now_s + BEAT_S
        return True

    def silent(self, now_s: float, limit_s: float) -> list[int]:
        """The nodes that have sent nothing for too long."""
        return [node for node, one in self._silences.items() if one.tick(now_s, limit_s)]


class RankSockets:
    """The links to the ranks of other nodes, each on a socket and a port of its own."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._context: ZmqContext = zmq.Context()
        self.links: dict[int, NodeLink] = {}  # in the order of ranks
        self.ports: dict[int, int] = {}

    def open(self, rank: int, host: str, keys: CurveKeys) -> None:
        """Raises DoorError."""
        socket = listening(self._context, zmq.DEALER, keys)
        self.ports[rank] = bind(socket, host)
        self.links[rank] = NodeLink(socket, self._loss)

    def close(self) -> None:
        self._context.destroy(linger=0)
        self.links.clear()


class OtherNodes:
    """All nodes but node 0."""

    def __init__(self, config: EngineConfig, facts: dict[str, str], loss: Loss) -> None:
        """Listen for the other nodes. `config` is resolved; the reason of a lost node is reported
        to `loss`. Raises SettingsError if this node does not have the address in the settings."""
        host, port = address_of(config)
        self._terms = NodeTerms(config, facts)
        self._loss = loss
        self._at_door: ZmqContext = zmq.Context()  # its `term` waits until all messages are sent
        self._peers = NodePeers()
        self._sockets = RankSockets(loss)
        self._serves = False
        self._ends = threading.Event()
        self._reason = ""  # reason of the end
        self._has_parted = False
        self._thread: threading.Thread | None = None
        self._on_lost: Callable[[str], None] = loss.tell
        try:
            self.host = resolved(host)
            keys = keys_of(config.dist_secret)
            self._door = Door(self._at_door, keys, self.host, port)
            for node in range(1, config.nnodes):
                for rank in ranks_of(config, node):
                    self._sockets.open(rank, self.host, keys)
            self.store, self.store_port = listening_store(
                self.host, config.tp_size, config.dist_timeout
            )
        except (DoorError, OSError) as exc:
            self._at_door.destroy(linger=0)
            self._sockets.close()
            raise SettingsError(f"--dist-init-addr: {exc}") from exc
        log.info("waits_for_nodes", number=config.nnodes - 1, address=f"{self.host}:{port}")

    @property
    def links(self) -> Mapping[int, NodeLink]:
        """The links to the ranks of other nodes, in the order of ranks."""
        return self._sockets.links

    def await_all(self, on_lost: Callable[[str], None]) -> None:
        """Wait until every node has come, then watch the nodes: when one is lost, another thread
        calls `on_lost` with the reason. Raises NodeMissing."""
        self._on_lost = on_lost
        config = self._terms.config
        until_s = time.monotonic() + config.dist_timeout
        while len(self._peers) + 1 < config.nnodes:
            if time.monotonic() > until_s:
                raise NodeMissing(self._missing())
            self._handle_next()
            if self._loss.reason:
                raise NodeMissing(self._loss.reason)
        self._thread = threading.Thread(target=self._watch, name="nodes", daemon=True)
        self._thread.start()

    def tell_serving(self) -> None:
        """Tell the nodes from now on that all ranks have loaded."""
        self._serves = True

    def take_leave(self, reason: str = "") -> None:
        """Send a farewell to all nodes, and wait until it has left. `reason`: of the end; "" if a
        user asked for it. Any thread may call this; a second call waits for the first."""
        if not self._ends.is_set():
            self._reason = reason
            self._ends.set()
        if self._thread is None or self._thread is threading.current_thread():
            self._part()
        else:
            self._thread.join(LEAVE_S)

    def close(self) -> None:
        """Close the links of ranks. Called by the thread that uses them, after the farewell."""
        self._sockets.close()

    def _take(self, heard: Heard) -> None:
        peer, word = heard
        is_known = self._peers.heard(peer)
        if is_known and isinstance(word, LostRank):
            self._lose(word.reason)
        if not isinstance(word, Greeting):
            return
        reason = self._terms.refusal(word, self._peers.by_node)
        if reason:
            log.warning("node_declined", node=word.node, reason=reason)
            self._door.say(peer, NodeDeclined(reason))
            return
        self._peers.add(word.node, peer)
        config = self._terms.config
        ports = [self._sockets.ports[rank] for rank in ranks_of(config, word.node)]
        settings = msgspec.json.encode(config)
        self._door.say(peer, NodeWelcome(settings, ports, self.store_port))
        log.info("node_came", node=word.node)

    def _missing(self) -> str:
        config = self._terms.config
        missing = [node for node in range(1, config.nnodes) if node not in self._peers.by_node]
        names = ", ".join(map(str, missing))
        text = (
            f"node {names} did not join node 0 at {config.dist_init_addr} within "
            f"{config.dist_timeout:g} s (--dist-timeout)"
        )
        if self._door.num_strangers:
            text += "; a process with another secret tried to join (WEFT_DIST_SECRET)"
        return text

    def _watch(self) -> None:
        while not self._ends.is_set():
            self._handle_next()
        self._part()

    def _handle_next(self) -> None:
        """Handle the next message; every `BEAT_S`, send beats and check which nodes are silent."""
        heard = self._door.hear()
        if heard is not None:
            self._take(heard)
        now_s = time.monotonic()
        if self._ends.is_set() or not self._peers.beat_is_due(now_s):
            return
        word = Serving() if self._serves else NodeBeat()
        for peer in self._peers.by_node.values():
            self._door.say(peer, word)
        limit_s = SILENT_S if self._serves else SILENT_WHILE_LOADING_S
        for node in self._peers.silent(now_s, limit_s):
            self._lose(f"node {node} has sent nothing for {limit_s:g} s")

    def _lose(self, reason: str) -> None:
        if not self._loss.reason and not self._ends.is_set():
            self._loss.tell(reason)
            self._on_lost(reason)

    def _part(self) -> None:
        """Send the farewell, and wait for the answers for up to `FAREWELL_S`."""
        if self._has_parted:
            return
        self._has_parted = True
        missed = set(self._peers.by_node.values())
        for peer in missed:
            self._door.say(peer, Farewell(self._reason))
        until_s = time.monotonic() + FAREWELL_S
        while missed and time.monotonic() < until_s:
            heard = self._door.hear()
            if heard is not None and isinstance(heard.word, Parting):
                missed.discard(heard.peer)
        self._door.close()
        self._at_door.term()

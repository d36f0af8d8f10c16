"""The verb `serve` on a node that follows node 0 (`--node-rank` above 0). The node waits for node
0, starts its own ranks, and ends when node 0 ends or when one of its ranks is lost.

It answers probes only (`node_health.py`), and decides nothing: its settings come from node 0. Only
the model's files are local.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq

from weft.assemble.checkpoint import check_files
from weft.assemble.model_config import choose_model
from weft.assemble.model_folder import model_folder
from weft.assemble.node_facts import facts_of
from weft.assemble.rank_processes import RankProcesses
from weft.config.engine import EngineConfig
from weft.config.engine_args import FollowerArgs
from weft.config.machine import probe
from weft.config.model import ModelConfig
from weft.config.nodes import address_of, check_nodes, ranks_of
from weft.config.numbers import counted
from weft.config.options import SettingsError
from weft.config.resolve import resolve
from weft.config.server import ServerConfig
from weft.launch.listen import listen
from weft.launch.node_health import NodeHealth, answering
from weft.launch.signals import StartSignals, Stopped
from weft.observe import log
from weft.parallel.door import (
    BEAT_S,
    SILENT_S,
    SILENT_WHILE_LOADING_S,
    DoorCaller,
    DoorClosed,
    DoorError,
    DoorLocked,
    Farewell,
    Greeting,
    LostRank,
    NodeBeat,
    NodeDeclined,
    NodeWelcome,
    Parting,
    Serving,
    Silence,
    Word,
    keys_of,
    resolved,
)
from weft.version import __version__

OWN = ("model", "tokenizer", "revision", "weights_root", "node_rank", "dist_init_addr")


class NodeEnd(Exception):
    """This node ends, with a line for the user and an exit status."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


def follow_node(asked: EngineConfig, server: ServerConfig) -> int:
    """Follow node 0 until the end. Returns the exit status: 0 if node 0 or this node was asked to
    stop; 1 if something failed; 2 if node 0 does not accept this node, or does not answer. Raises
    SettingsError and ModelError for faults of this node's settings and files."""
    check_nodes(asked)
    log.setup(server.log_level, format=server.log_format)
    folder = model_folder(asked)
    has_weights = asked.load_format != "dummy"
    check_files(folder, weights=has_weights)
    model = choose_model(asked, folder)
    try:
        with StartSignals(), ExitStack() as started:
            listener = started.enter_context(listen(server.host, server.port))
            node = NodeFollower(asked, server, folder, model)
            started.callback(node.close)
            started.enter_context(answering(node.health, listener, server))
            try:
                node.run()
            except Stopped:
                node.tell_end(f"node {asked.node_rank} was stopped")
                raise
    except Stopped:
        return 0
    except NodeEnd as end:
        return _say_end(end, server)
    return 0


def _say_end(end: NodeEnd, server: ServerConfig) -> int:
    if server.log_format == "json":
        log.EventLog("serve").error("ended", reason=str(end), status=end.status)
    elif end.status or server.log_level in ("debug", "info"):
        print(f"weft: {end}", file=sys.stderr, flush=True)
    return end.status


class NodeFollower:
    """A node that follows node 0, from its greeting to the end."""

    def __init__(
        self, asked: EngineConfig, server: ServerConfig, folder: Path, model: ModelConfig
    ) -> None:
        """Raises SettingsError if the address of node 0 is invalid."""
        self._asked = asked
        self._server = server
        self._folder = folder
        self._model = model
        self.health = NodeHealth(asked.node_rank, asked.nnodes)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._lost: deque[str] = deque()  # reasons why ranks ended, from other threads
        self._ranks = RankProcesses(self._lost.append)
        host, port = address_of(asked)
        try:
            self._host = resolved(host)
            keys = keys_of(asked.dist_secret)
            self._caller = DoorCaller(self._context, keys, self._host, port)
        except (DoorError, DoorClosed) as exc:
            raise SettingsError(f"--dist-init-addr: {exc}") from exc

    def run(self) -> None:
        """Follow node 0 until NodeEnd is raised."""
        node = self._asked.node_rank
        wait_s = self._asked.dist_timeout
        self._print(
            f"weft {__version__} · {self._model.name} · node {node} of {self._asked.nnodes} · "
            f"waits for node 0 at {self._asked.dist_init_addr} for {wait_s:g} s (--dist-timeout)"
        )
        welcome = self._greet()
        self.health.tell("its ranks are being loaded")
        config = self._settings(welcome)
        first, *others = ranks_of(config, node)
        names = f"rank {first}"
        if others:
            names = f"ranks {first} to {others[-1]}"
        for rank, plans in zip((first, *others), welcome.plans, strict=True):
            self._start(rank, config, welcome.store, plans)
        self._ranks.watch()
        threads = counted(config.threads, "thread")
        self._print(f"  {names} of {config.tp_size} · {threads} for each")
        self._follow()

    def tell_end(self, reason: str) -> None:
        """Tell node 0 that this node ends first."""
        self._caller.say(LostRank(reason))

    def close(self) -> None:
        """End the ranks of this node. The last message to node 0 is still sent."""
        self._ranks.close()
        self._caller.close()
        self._context.term()

    def _greet(self) -> NodeWelcome:
        facts = facts_of(self._asked, self._model, self._folder)
        # The secret is not sent: a node with another secret cannot connect at all.
        settings = msgspec.json.encode(replace(self._asked, dist_secret=""))
        greeting = Greeting(self._asked.node_rank, facts, settings)
        until_s = time.monotonic() + self._asked.dist_timeout
        is_said = False
        while True:
            is_said = is_said or self._caller.say(greeting)
            word = self._hear()
            if isinstance(word, NodeWelcome):
                return word
            if isinstance(word, NodeDeclined):
                raise NodeEnd(f"node 0 refuses: {word.reason}", 2)
            if isinstance(word, Farewell):
                raise _end_of(word)
            if time.monotonic() > until_s:
                where = self._asked.dist_init_addr
                raise NodeEnd(
                    f"node 0 did not answer at {where} within {self._asked.dist_timeout:g} s "
                    "(--dist-timeout)",
                    2,
                )

    def _settings(self, welcome: NodeWelcome) -> EngineConfig:
        """The settings of node 0, except those of this machine (`OWN`, threads). Raises
        SettingsError if this machine has too little memory."""
        theirs = msgspec.json.decode(welcome.settings, type=EngineConfig)
        own = {name: getattr(self._asked, name) for name in OWN}
        machine = probe()
        num_ranks = theirs.tp_size // theirs.nnodes
        threads = self._asked.threads or max(machine.cores // num_ranks, 1)
        config = replace(theirs, **own, dist_secret=self._asked.dist_secret, threads=threads)
        try:
            resolve(replace(config, node_rank=0), self._model, machine)
        except SettingsError as exc:
            self.tell_end(f"node {self._asked.node_rank}: {exc}")
            raise
        return config

    def _start(self, rank: int, config: EngineConfig, store: int, plans: int) -> None:
        self._ranks.start(
            FollowerArgs(
                config=config,
                folder=str(self._folder),
                rank=rank,
                link=-1,
                meeting="",
                memory=-1,
                log_level=log.get_level(),
                log_format=log.get_format(),
                host=self._host,
                store=store,
                plans=plans,
            )
        )

    def _follow(self) -> None:
        """Send `NodeBeat`s and receive messages until NodeEnd is raised."""
        now_s = time.monotonic()
        silence = Silence(now_s)
        next_beat_s = now_s
        serves = False
        while True:
            word = self._hear()
            if word is not None:
                silence.heard()
            if isinstance(word, Serving) and not serves:
                serves = True
                self.health.tell("")
                self._print(f"node 0 serves · process {os.getpid()} follows")
            if isinstance(word, Farewell):
                raise _end_of(word)
            if self._lost:
                reason = self._lost[0]
                self.tell_end(reason)
                raise NodeEnd(reason, 1)
            now_s = time.monotonic()
            if now_s < next_beat_s:
                continue
            next_beat_s = now_s + BEAT_S
            self._caller.say(NodeBeat())
            limit_s = SILENT_S if serves else SILENT_WHILE_LOADING_S
            if silence.tick(now_s, limit_s):
                raise NodeEnd(f"node 0 has sent nothing for {limit_s:g} s", 1)

    def _hear(self) -> Word | None:
        self.health.goes_on()
        try:
            word = self._caller.hear()
            if isinstance(word, Farewell):
                self._caller.say(Parting())
            return word
        except DoorLocked as exc:
            raise NodeEnd(str(exc), 2) from exc
        except DoorClosed as exc:
            raise NodeEnd(str(exc), 1) from exc

    def _print(self, line: str) -> None:
        if self._server.log_level in ("debug", "info") and self._server.log_format != "json":
            print(line, file=sys.stderr, flush=True)


def _end_of(word: Farewell) -> NodeEnd:
    if word.reason:
        return NodeEnd(f"node 0 has ended: {word.reason}", 1)
    return NodeEnd("node 0 has ended", 0)

"""The line that an engine, or a process that follows one, reads from its standard input.

The launcher keeps that pipe open as long as it lives: end of file means that the launcher is gone,
and the engine exits immediately. The module is apart from `process.py`, because helper processes
that know no settings would load all of them, for a fifth of the time of their start.
"""

from __future__ import annotations

import msgspec

from weft.config.engine import EngineConfig


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True):
    config: EngineConfig  # resolved
    folder: str  # folder of the model
    to_engine: str  # ipc address, like `from_engine`; the front binds both, the engine connects
    from_engine: str
    rpc: str  # ipc address that the engine binds, for RPC clients
    log_level: str
    log_format: str = "text"
    # File descriptors of the sockets to the engines that divide the experts with this one, by rank;
    # -1 for the engine itself.
    peers: tuple[int, ...] = ()

    def to_json(self) -> bytes:
        """One line, without the line break."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, line: bytes | str) -> EngineArgs:
        return msgspec.json.decode(line, type=cls)


class FollowerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The line that a process that follows rank 0 reads, as an engine reads `EngineArgs`."""

    config: EngineConfig  # resolved
    folder: str  # folder of the model
    rank: int
    link: int  # file descriptor of the socket to rank 0; -1: rank 0 is on another node
    meeting: str  # path of the file in which ranks meet, if gloo joins them on one machine
    memory: int  # file descriptor of the shared memory of ranks; -1: none
    pool: int = -1  # file descriptor of its K and V, which rank 0 also has; -1: none
    # File descriptors of the sockets to the previous and the next stage, if layers are divided; -1:
    # none.
    before: int = -1
    behind: int = -1
    host: str = ""  # address of node 0, if there are several nodes
    store: int = 0  # port on `host` at which ranks meet
    plans: int = 0  # port on `host` at which this rank gets its plans
    # File descriptor of the pipe for the reason of its end; -1: no process reads it.
    last_words: int = -1
    log_level: str
    log_format: str

    def to_json(self) -> bytes:
        """One line, without the line break."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, line: bytes | str) -> FollowerArgs:
        return msgspec.json.decode(line, type=cls)

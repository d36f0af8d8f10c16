"""What the engine process is told when it is started: one line of JSON on its standard input.

The launcher keeps that pipe open for as long as it lives: end of file there means that the parent is gone, and the
engine exits at once.
"""

from __future__ import annotations

import os
import sys

import msgspec

from weft.config.engine import EngineConfig


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True):
    config: EngineConfig  # resolved
    folder: str  # where the model lies
    to_engine: str  # ipc addresses; the front binds both, the engine connects
    from_engine: str
    rpc: str  # ipc address that the engine binds, for RPC clients
    log_level: str
    log_format: str = "text"

    def to_json(self) -> bytes:
        """One line, without the line break."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, line: bytes | str) -> EngineArgs:
        return msgspec.json.decode(line, type=cls)


def module_command(name: str) -> tuple[str, ...]:
    """The command that runs a module in a process of its own. That imports from the current folder only if this process
    does, too: who serves a model from within its folder does not run a torch.py that lies there."""
    is_here = sys.path[0] in ("", os.getcwd())
    return (sys.executable, *(() if is_here else ("-P",)), "-m", name)

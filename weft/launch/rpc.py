"""Makes control requests by name, over the RPC socket of a server on this machine.

The caller needs neither HTTP nor a key, but must be able to enter the server's private folder.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from weft.client.fleet.joined import join
from weft.config.options import SettingsError
from weft.json_types import JsonObject
from weft.launch.engine_process import FOLDER_PREFIX, RPC_SOCKET
from weft.messages.by_name import BadCall, plain, request_named
from weft.messages.calls import CallFailed, ControlReply, ControlRequest, SuccessReply
from weft.messages.channel import RpcCaller

TIMEOUT_S = 10.0


def running() -> dict[int, Path]:
    """The servers of this user on this machine: process id → private folder."""
    found: dict[int, Path] = {}
    for parent in dict.fromkeys((Path(tempfile.gettempdir()), Path("/tmp"))):
        for folder in parent.glob(f"{FOLDER_PREFIX}*-*"):
            pid = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
            with suppress(OSError):
                if pid.isdigit() and folder.stat().st_uid == os.getuid() and _sockets(folder):
                    os.kill(int(pid), 0)
                    found[int(pid)] = folder
    return found


def rpc(
    method: str, params: JsonObject | None = None, *, pid: int = 0, timeout_s: float = TIMEOUT_S
) -> Any:
    """Make the control request `method` and return its reply, as plain values.

    Every engine of the server gets the request; their replies are joined into one. `pid` chooses
    among several servers. Raises SettingsError if there is no such server, if it does not answer,
    or if it refuses the call; then the error names the existing methods, or the fault in the
    parameters.
    """
    folder = _folder(pid)
    try:
        request = request_named(method, params or {})
    except BadCall as exc:
        raise SettingsError(str(exc)) from exc
    replies: dict[int, ControlReply] = {}
    for rank, socket in enumerate(_sockets(folder)):
        replies[rank] = _call(socket, request, timeout_s)
    reply = join(replies)
    if isinstance(reply, CallFailed) or (isinstance(reply, SuccessReply) and not reply.success):
        raise SettingsError(reply.message)
    return plain(reply)


def _sockets(folder: Path) -> list[Path]:
    """The socket of each engine of a server, in the order of ranks."""
    found = [path for path in folder.glob(f"{RPC_SOCKET}*") if path.is_socket()]
    return sorted(found, key=lambda path: (len(path.name), path.name))


def _call(socket: Path, request: ControlRequest[Any], timeout_s: float) -> ControlReply:
    """The reply of one engine. Raises SettingsError if there is none."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    caller = RpcCaller(context, f"ipc://{socket}")
    try:
        reply = caller.call(request, timeout_s)
    finally:
        caller.close()
        context.term()
    if reply is None:
        raise SettingsError(f"the engine has not answered for {timeout_s:g} s")
    return reply


def _folder(pid: int) -> Path:
    servers = running()
    if not servers:
        raise SettingsError("no server of this user runs on this machine; weft serve starts one")
    if pid in servers:
        return servers[pid]
    names = ", ".join(map(str, sorted(servers)))
    if pid:
        raise SettingsError(f"there is no server with the process id {pid}; there are {names}")
    if len(servers) > 1:
        raise SettingsError(
            f"several servers run on this machine; choose one by its process id: {names}"
        )
    return next(iter(servers.values()))

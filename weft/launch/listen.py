"""Opens the listening socket before anything is loaded: if the port is taken, the error comes
immediately and names the process that has it."""

from __future__ import annotations

import errno
import socket

from weft.config.options import SettingsError

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 chooses a free port. Raises SettingsError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or "0.0.0.0", port, type=socket.SOCK_STREAM
        )[0]
    except OSError as exc:
        raise SettingsError(
            f"--host is {host!r}, which is not an address of this machine ({exc.strerror})"
        ) from exc
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # allow a port that another process has just closed
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        raise SettingsError(_refusal(host, port, exc)) from exc
    listener.setblocking(False)
    return listener


def holder(port: int) -> str:
    """The process that listens on `port`, as "python3 (pid 123)"; "" if it is unknown."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if not connection.laddr or connection.status != psutil.CONN_LISTEN:
                continue
            if connection.laddr.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass
    return ""


def _refusal(host: str, port: int, exc: OSError) -> str:
    if exc.errno == errno.EADDRINUSE:
        other = port + 1 if port < 65535 else port - 1
        who = holder(port) or "another process"
        return (
            f"port {port} on {host} is taken by {who}; stop it, or choose another with --port "
            f"{other}"
        )
    if exc.errno in (errno.EACCES, errno.EPERM):
        return (
            f"port {port} on {host} may not be used by this user; choose one from 1024 up with "
            "--port"
        )
    if exc.errno == errno.EADDRNOTAVAIL:
        return (
            f"--host is {host}, which is not an address of this machine; 127.0.0.1 is this "
            "machine alone, 0.0.0.0 means all of its addresses"
        )
    return f"cannot listen on {host} port {port}: {exc.strerror}"

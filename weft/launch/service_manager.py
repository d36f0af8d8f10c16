"""Tells systemd, or whoever started the server, in which state it is: ready, or stopping.

The service manager names a socket in NOTIFY_SOCKET; without it nothing is sent.
Source: sd_notify(3).
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

READY = "READY=1\nSTATUS=ready"
STOPPING = "STOPPING=1\nSTATUS=open requests may end"


def notify(state: str) -> None:
    """Send a state. A manager that does not listen is no fault of the server."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = f"\0{address[1:]}"  # a name that is no file
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
        connection.settimeout(1.0)
        connection.sendto(state.encode(), address)

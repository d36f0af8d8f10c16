"""Clients that ask for what is read without end, and the processes that read it."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

from tests.server.fake import HANG_S, RunningServer


def endless_readers() -> set[int]:
    """The processes of this one that read a picture without end."""
    found: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            _, name, rest = re.split(r"[()]", (folder / "stat").read_text())
        except (OSError, ValueError):
            continue
        if name == "endless" and int(rest.split()[1]) == os.getpid():
            found.add(int(folder.name))
    return found


def begin(server: RunningServer, path: str, body: dict[str, Any]) -> socket.socket:
    """A client that has asked for a picture without end."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
    client = socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S)
    client.sendall(head.encode() + content)
    return client

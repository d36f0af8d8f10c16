"""The cache on disk of a server, as its own figures say it."""

from __future__ import annotations

import time

from tests.e2e.server import HANG_S, Server


def wait_for(server: Server, state: str, num_blocks: int = 0) -> None:
    """Wait until the cache on disk is in this state, and has so many blocks."""
    begun = time.monotonic()
    while time.monotonic() < begun + HANG_S:
        told = server.get("/cache")
        if told["disk"] == state and told["disk_blocks"] >= num_blocks:
            return
        time.sleep(0.02)
    raise AssertionError(server.get("/cache"))

"""Servers for measurements: started, waited for, and ended."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import httpx

LOOK_S = 0.2  # from one look whether it is ready to the next


class Served(NamedTuple):
    """`weft` with a verb, ready."""

    url: str
    process: subprocess.Popen[bytes]


@contextmanager
def served(*words: str, port: int = 0, cores: str = "", nice: int = 0) -> Iterator[Served]:
    """`weft` with these words, such as `serve weft-nano`; its log has warnings alone.

    `port`: 0 takes one that is free. `cores` are those that it may run on, as `taskset -c` takes
    them; `nice`: how far it gives way to others. Raises RuntimeError if it ends instead of
    becoming ready.
    """
    port = port or _free_port()
    command = [sys.executable, "-m", "weft", *words, "--port", str(port), "--log-level", "warning"]
    if nice:
        command = ["nice", "-n", str(nice), *command]
    if cores:
        command = ["taskset", "-c", cores, *command]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_ready(url):
            if process.poll() is not None:
                raise RuntimeError(f"weft {' '.join(words)} has ended with {process.returncode}")
            time.sleep(LOOK_S)
        yield Served(url, process)
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])

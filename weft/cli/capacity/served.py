"""A server of this machine for a measurement: started, waited for, and ended."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from weft.config.options import SettingsError

POLL_S = 0.1
END_S = 30.0
ANSWER_S = 5.0
MAX_REASON = 500  # characters of a server's last words


class MeasuredServer(NamedTuple):
    url: str


@contextmanager
def measured_server(words: Sequence[str], journal: Path) -> Iterator[MeasuredServer]:
    """`weft serve` with these words on a free port of this machine. `journal` is complete when the
    server has ended. Raises SettingsError if it does not start."""
    port = _free_port()
    command = [sys.executable, "-m", "weft", "serve", *words]
    command += ["--host", "127.0.0.1", "--port", str(port), "--journal", str(journal)]
    command += ["--no-page", "--log-level", "warning"]
    log_name = journal.with_suffix(".log")
    with open(log_name, "w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait(process, port, log_name)
            yield MeasuredServer(f"http://127.0.0.1:{port}")
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def words_of(options: Mapping[str, str | int | float | bool | None]) -> list[str]:
    """Options as words of a command line."""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}={value}"]
    return words


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Return when the server is ready. Raises SettingsError if it ends before."""
    while not _is_ready(port):
        if process.poll() is not None:
            reason = log.read_text(encoding="utf-8", errors="replace").strip()
            reason = reason.removeprefix("weft: ")
            raise SettingsError(f"weft serve does not start here: {reason[-MAX_REASON:]}")
        time.sleep(POLL_S)


def _is_ready(port: int) -> bool:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)) as connection:
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port

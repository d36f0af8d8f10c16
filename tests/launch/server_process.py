"""Runs `weft serve` with the fake engine as a process, talks to it, and looks at what it leaves
behind."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import psutil

from tests.forked import ForkedServer, can_fork

HERE = Path(__file__).parent
TIMEOUT_S = 240.0  # whatever takes so long hangs


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(condition, timeout_s: float = TIMEOUT_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class ServerProcess:
    """Use as a context manager; afterwards nothing of it runs."""

    def __init__(self, model: Path, *options: str, behaviour: str = "") -> None:
        self.tmp = Path(tempfile.mkdtemp(prefix="w", dir="/tmp"))
        self.pid_file = self.tmp / "pid"
        self.gate = self.tmp / "gate"  # made: an engine with `gated` goes on
        self._port = 0
        environ = {
            **os.environ,
            "TMPDIR": str(self.tmp),
            "FAKE_ENGINE": behaviour,
            "FAKE_PID_FILE": str(self.pid_file),
            "FAKE_GATE": str(self.gate),
        }
        words = ["serve", str(model), "--port", "0", *options]
        self.process: ForkedServer | subprocess.Popen[str]
        if can_fork(environ) and "importing" not in behaviour.split():
            self.process = ForkedServer(words, environ, "tests.launch.fake_engine")
        else:
            command = [sys.executable, str(HERE / "weft_with_fake.py"), *words]
            self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        for file in self.tmp.glob("pid*"):
            pid = int(file.read_text())
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.tmp, ignore_errors=True)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    @property
    def engine_pid(self) -> int:
        assert eventually(lambda: self.pid_file.exists() and self.pid_file.read_text())
        return int(self.pid_file.read_text())

    def pid_of(self, rank: int) -> int:
        """Of an engine beside others, the latest."""
        file = self.pid_file.with_name(f"pid.dp{rank}")
        assert eventually(lambda: file.exists() and file.read_text())
        return int(file.read_text())

    @property
    def socket_folders(self) -> list[Path]:
        return list(self.tmp.glob("weft-*"))

    @property
    def port(self) -> int:
        """Where it listens, as soon as it does; 0 if it has ended before."""
        assert self._port or eventually(
            lambda: self._look_for_port() or self.process.poll() is not None
        )
        return self._port

    def _look_for_port(self) -> bool:
        try:
            found = psutil.Process(self.process.pid).net_connections("tcp")
        except psutil.Error:  # it has ended
            return False
        self._port = next((one.laddr.port for one in found if one.status == psutil.CONN_LISTEN), 0)
        return self._port > 0

    def wait_ready(self) -> ServerProcess:
        assert eventually(lambda: any(re.match("ready in", line) for line in self.lines)), (
            self.lines
        )
        return self

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for its end. Returns the exit status; afterwards `lines` is complete."""
        status = self.process.wait(timeout_s)
        self._reader.join()
        return status

    def get(self, path: str) -> int:
        """The status of a GET; 0 if nobody listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except ConnectionRefusedError:
            return 0
        finally:
            connection.close()

    def stream(self, max_tokens: int) -> Iterator[str]:
        """Text by text what a completion brings; raises StreamError for an error in the stream."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        body = json.dumps({"prompt": "x", "max_tokens": max_tokens, "stream": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        try:
            if response.status != 200:
                raise StreamError(f"{response.status} {response.read().decode()}")
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if data in ("", "[DONE]"):
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise StreamError(event["error"]["message"])
                yield event["choices"][0]["text"]
        finally:
            connection.close()


class StreamError(Exception):
    pass

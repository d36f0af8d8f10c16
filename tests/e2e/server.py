"""A real server as a child process, for tests: the bundled model, on a free port."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil

from tests.forked import ForkedServer, can_fork

HANG_S = 240.0  # whatever takes so long does not come any more
SMALL = (
    "--kv-tokens",
    "8192",
    "--max-running-requests",
    "16",
    "--threads",
    "1",
    "--grammar-timeout-s",
    str(HANG_S),
)


class Server:
    """`weft serve` with `options`; everything it prints is in `lines`."""

    def __init__(
        self, *options: str, module: Sequence[str] = ("weft",), small: Sequence[str] = SMALL
    ) -> None:
        """`module`: what is run instead of `python -m weft`, with its first arguments; `small`:
        options that keep it small."""
        words = ["serve", "--port", "0", *small, *options]
        self.process = start(words) if tuple(module) == ("weft",) else _program(module, words)
        self.lines: list[str] = []
        self._url = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            if not self._url.wait(HANG_S) or not self.url:
                raise AssertionError("the server did not start:\n" + "\n".join(self.lines))
            self.engines = self.find_engines()
        except BaseException:
            self._kill()
            raise

    @property
    def engine(self) -> psutil.Process:
        return self.engines[0]

    def _kill(self) -> None:
        self.process.kill()  # the engine ends with it
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if found := re.search(r"ready in .* (http://\S+)", line):
                self.url = found[1]
                self._url.set()
        self._url.set()

    def find_engines(self) -> list[psutil.Process]:
        return [
            p
            for p in psutil.Process(self.process.pid).children(recursive=True)
            if "worker" in " ".join(p.cmdline())
        ]

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=HANG_S) as answer:
            return json.load(answer)

    def post(self, path: str, **body: object) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            return (
                json.load(answer)
                if "json" in answer.headers["Content-Type"]
                else answer.read().decode()
            )

    def load(self) -> dict[str, Any]:
        """The engine's own numbers, as it answers them now: an older answer is asked for again."""
        while True:
            began = time.monotonic()
            (load,) = self.get("/v1/loads")["loads"]
            if load["age_s"] <= time.monotonic() - began:
                return dict(load)

    @contextlib.contextmanager
    def slowed(self, step_s: float = 0.1) -> Iterator[None]:
        """So slow that nothing ends by itself before the test has done what it wants."""
        self.post("/slow_down", forward_sleep_time=step_s)
        yield
        self.post("/slow_down", forward_sleep_time=None)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the end. Returns the exit status. A server that does not obey
        is killed."""
        try:
            if self.process.poll() is None:
                self.process.send_signal(how)
            status = self.process.wait(HANG_S)
        except BaseException:
            self._kill()
            raise
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


def start(words: Sequence[str]) -> ForkedServer | subprocess.Popen[str]:
    return ForkedServer(words) if can_fork() else _program(("weft",), words)


def run_weft(*words: str) -> tuple[int, str]:
    """Run `weft` with these words to its end. Returns its exit status and what it wrote as
    errors."""
    process = start(words)
    assert process.stderr is not None
    with process.stderr:
        text = process.stderr.read()
    return process.wait(HANG_S), text


def _program(module: Sequence[str], words: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", *module, *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def wait_until(condition: Callable[[], bool], timeout_s: float = HANG_S) -> bool:
    """Look again and again until it holds; false if it never does."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()

"""Ranks, stages, engines and nodes of one model that die, stand still or raise while streams are
open: every client has an error within 5 s, the server ends with status 1 and one line that names
who is lost and why, and nothing of it is left.

    python -m tests.launch.lost_ranks_proof [WORD ...]

A WORD chooses the cases that have it in their names, such as `shm` or `SIGSTOP`. It is no test,
because each case starts a server. Prints one line for each case; the status is 1 if one does not
hold. Linux alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.e2e.server import Server, wait_until
from tests.launch.ports import free_port
from tests.launch.tiny_model import write_model_with_experts
from tests.nano_adapters import NANO

BAR_S = 5.0
NUM_STREAMS = 8
STEP_S = 0.05  # so that streams last
LAST_S = 60.0  # for what should be there within the bar
# In a rank that follows: the next step after SIGUSR1 raises, as one that finds no memory.
RAISE_AT_SIGNAL = """
import signal
import sys


def raise_in_next_step(number, frame):
    from weft.executor.ranks import follower

    def unpack(*args):
        raise MemoryError("no memory for this step")

    follower.unpack = unpack


if "weft.launch.follower" in sys.orig_argv:
    signal.signal(signal.SIGUSR1, raise_in_next_step)
"""
SMALL = ("--kv-tokens", "32768", "--max-running-requests", "16", "--threads", "1")
TWO = ("--tp-size", "2", "--device", "cpu")
FOLLOWER = "weft.launch.follower"
ENGINE = "weft.launch.start_worker"
NODE = "--node-rank"


class Case(NamedTuple):
    name: str
    options: Sequence[str]
    victim: str  # a word of its command line
    how: signal.Signals
    line: str  # what the last line has


def cases(experts: Path) -> list[Case]:
    kinds = {
        "shm": (str(NANO), *TWO, "--dist-backend", "shm"),
        "tcp": (str(NANO), *TWO, "--dist-backend", "tcp"),
        "gloo": (str(NANO), *TWO, "--dist-backend", "gloo"),
        "stages": (str(NANO), "--pp-size", "2", "--device", "cpu"),
        "nodes": (str(NANO), *TWO, "--nnodes", "2"),
    }
    found = []
    for kind, options in kinds.items():
        raised = "rank 1 failed: MemoryError: no memory for this step"
        for how, line in (
            (signal.SIGKILL, "rank 1 was ended by SIGKILL (signal 9)"),
            (signal.SIGSTOP, "rank 1 was stopped by SIGSTOP (signal 19)"),
            (signal.SIGUSR1, raised),
        ):
            found.append(Case(f"{kind}: {how.name} of rank 1", options, FOLLOWER, how, line))
        killed = signal.SIGKILL
        found.append(Case(f"{kind}: SIGKILL of rank 0", options, ENGINE, killed, "SIGKILL"))
    nodes = kinds["nodes"]
    for how, line in ((signal.SIGKILL, "node 1"), (signal.SIGSTOP, "node 1 has sent nothing")):
        found.append(Case(f"nodes: {how.name} of node 1", nodes, NODE, how, line))
    joined = (str(experts), "--dp-size", "2", "--enable-dp-attention", "--hang-timeout-s", "1")
    for how, line in ((signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "engine 0 is lost")):
        found.append(Case(f"experts: {how.name} of an engine", joined, ENGINE, how, line))
    return found


class OneOfSeveral(Server):
    """Whose engine is not looked for: there may be more than one."""

    def _find_engine(self) -> psutil.Process:
        return psutil.Process(self.process.pid)


class Stream(threading.Thread):
    """A client, and when it had its end."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.has_begun = threading.Event()
        self.ended_at_s = 0.0
        self.lines: list[str] = []

    def run(self) -> None:
        body = {"prompt": "import os\n", "max_tokens": 200, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"{self._url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=LAST_S) as answer:
                for line in answer:
                    self.has_begun.set()
                    self.lines.append(line.decode())
        except (OSError, urllib.error.URLError) as exc:
            self.lines.append(f"{type(exc).__name__}: {exc}")
        self.ended_at_s = time.monotonic()
        self.has_begun.set()

    @property
    def has_error(self) -> bool:
        return any('"error"' in line or "HTTPError" in line for line in self.lines)


class Outcome(NamedTuple):
    answered_s: float  # the last client's
    other_ends: list[str]  # of clients that had no error
    status: int
    ended_s: float
    line: str
    left: list[str]

    def why_not(self, case: Case) -> str:
        """Why a case does not hold; "" if it does."""
        if self.answered_s > BAR_S:
            return f"a client waited for {self.answered_s:.1f} s"
        if self.other_ends:
            return f"{len(self.other_ends)} clients had no error: {self.other_ends[0]}"
        if self.status != 1:
            return f"the status is {self.status}"
        if not self.line.startswith("weft: ") or case.line not in self.line:
            return "the last line is another"
        return f"left: {self.left}" if self.left else ""


def run(case: Case, folder: Path) -> Outcome:
    """`folder`: for temporary files."""
    node: subprocess.Popen[bytes] | None = None
    options = list(case.options)
    if "--nnodes" in options:
        options += ["--dist-init-addr", f"127.0.0.1:{free_port()}"]
        command = [sys.executable, "-m", "weft", "serve", *SMALL, *options, "--node-rank", "1"]
        command += ["--port", "0"]
        node = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    server = OneOfSeveral(*options, small=SMALL)
    processes = psutil.Process(server.process.pid).children(recursive=True)
    if node is not None:
        processes += [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
    try:
        victim = next(one for one in processes if case.victim in one.cmdline())
        server.post("/slow_down", forward_sleep_time=STEP_S)
        streams = [Stream(server.url) for _ in range(NUM_STREAMS)]
        for stream in streams:
            stream.start()
        for stream in streams:
            assert stream.has_begun.wait(LAST_S)
        began_s = time.monotonic()
        victim.send_signal(case.how)
        status = server.process.wait(LAST_S)
        ended_s = time.monotonic() - began_s
        for stream in streams:
            stream.join(LAST_S)
        server.stop()
        if case.victim == NODE and case.how is signal.SIGSTOP:
            victim.resume()  # nobody can end it before: its machine is another one
        wait_until(lambda: not any(map(runs, processes)), BAR_S)
    finally:
        left = [f"process {one.pid}" for one in processes if runs(one)]
        for one in (*processes, psutil.Process()):
            if one.pid != os.getpid() and one.is_running():
                one.kill()
        server.process.kill()
        if node is not None:
            node.wait()
    left += [str(path) for path in folder.iterdir() if path.name.startswith("weft-")]
    left += [path.name for path in Path("/dev/shm").iterdir() if "weft" in path.name]
    return Outcome(
        max(stream.ended_at_s for stream in streams) - began_s,
        [f"{stream.lines[-3:]}" for stream in streams if not stream.has_error],
        status,
        ended_s,
        server.lines[-1],
        left,
    )


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def prove(folder: Path, words: Sequence[str]) -> int:
    """How many cases do not hold."""
    (folder / "sitecustomize.py").write_text(RAISE_AT_SIGNAL)
    temporary = folder / "tmp"
    temporary.mkdir()
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    os.environ["TMPDIR"] = str(temporary)
    num_failed = 0
    for case in cases(write_model_with_experts(folder / "experts")):
        if not all(word in case.name for word in words):
            continue
        outcome = run(case, temporary)
        why = outcome.why_not(case)
        num_failed += bool(why)
        print(f"{'FAIL' if why else 'ok  '} {case.name}: {why}", flush=True)
        print(
            f"     clients after {outcome.answered_s:.1f} s, end after {outcome.ended_s:.1f} s: "
            f"{outcome.line}",
            flush=True,
        )
    return num_failed


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        sys.exit(1 if prove(Path(made), sys.argv[1:]) else 0)

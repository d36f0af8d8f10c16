"""A model on two machines, as far as one machine can be two: each node in a network namespace of
its own, joined by a cable.

    python -m tests.launch.nodes_proof

Needs Linux, root and iproute2 (`ip netns`), and says so where it does not have them. It is no test:
two servers start, which takes as long as a test may take altogether. Prints one line for each
claim; the status is 1 if one does not hold.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.nano_adapters import NANO

NAMES = ("weft-n0", "weft-n1")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = 31410
HTTP_PORT = 31411
HANG_S = 600.0
SETTINGS = ("--tp-size", "2", "--nnodes", "2", "--threads", "1", "--dtype", "float32")
SMALL = ("--kv-tokens", "4096", "--max-running-requests", "4", "--device", "cpu")
ASK = """
import json, sys, urllib.request
body = {"prompt": "import os\\n", "max_tokens": 24, "temperature": 0}
request = urllib.request.Request(sys.argv[1] + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request, timeout=600))["choices"][0]["text"])
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def two_hosts() -> Iterator[None]:
    """Two namespaces with a cable between them."""
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "weft-c0",
            "netns",
            NAMES[0],
            "type",
            "veth",
            "peer",
            "name",
            "weft-c1",
            "netns",
            NAMES[1],
        )
        for index, (name, address) in enumerate(zip(NAMES, ADDRESSES, strict=True)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", f"weft-c{index}")
            ip("-n", name, "link", "set", f"weft-c{index}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def start(node: int, log: Path, *options: str, secret: str) -> subprocess.Popen[bytes]:
    command = ["ip", "netns", "exec", NAMES[node], sys.executable, "-m", "weft", "serve", str(NANO)]
    command += [*SETTINGS, *SMALL, "--node-rank", str(node), *options]
    command += ["--dist-init-addr", f"{ADDRESSES[0]}:{PORT}"]
    environ = {**os.environ, "WEFT_DIST_SECRET": secret}
    return subprocess.Popen(command, stderr=log.open("wb"), env=environ)


def await_line(log: Path, word: str, process: subprocess.Popen[bytes]) -> bool:
    until_s = time.monotonic() + HANG_S
    while word not in log.read_text():
        if process.poll() is not None or time.monotonic() > until_s:
            return False
        time.sleep(0.2)
    return True


def within(node: int, script: str, *arguments: str) -> str:
    command = ["ip", "netns", "exec", NAMES[node], sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    return done.stdout if done.returncode == 0 else f"failed: {done.stderr[-300:]}"


def alone(folder: Path) -> str:
    """What one rank answers."""
    script = (
        "import sys\nfrom weft import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], dtype='float32', threads=1, kv_tokens=4096, device='cpu')\n"
        "print(llm.generate('import os\\n', SamplingParams(max_new_tokens=24, temperature=0))[0].text)"
    )
    command = [sys.executable, "-c", script, str(NANO)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout


class Proof:
    def __init__(self) -> None:
        self.num_failed = 0

    def claim(self, holds: bool, text: str, detail: object = "") -> None:
        self.num_failed += not holds
        print(
            f"{'ok  ' if holds else 'FAIL'} {text}" + ("" if holds else f": {detail}"), flush=True
        )


def prove(folder: Path) -> int:
    proof = Proof()
    secret = secrets.token_hex(16)
    logs = [folder / "node0", folder / "node1", folder / "stranger"]
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        nodes.append(start(0, logs[0], "--port", str(HTTP_PORT), secret=secret))
        waits = await_line(logs[0], "waits_for_nodes", nodes[0])
        proof.claim(waits, "node 0 waits for the other one", logs[0].read_text()[-500:])
        stranger = start(1, logs[2], secret="another")
        status = stranger.wait(HANG_S)
        said = logs[2].read_text()
        proof.claim(
            status == 2 and "another secret" in said, "a node with another secret is told so", said
        )
        nodes.append(start(1, logs[1], secret=secret))
        ready = await_line(logs[0], "ready in", nodes[0])
        proof.claim(ready, "node 0 serves when node 1 has come", logs[0].read_text()[-500:])
        answer = within(0, ASK, f"http://127.0.0.1:{HTTP_PORT}")
        one = alone(folder)
        proof.claim(answer == one, "two nodes answer as one rank", json.dumps([answer, one]))
        ip("-n", NAMES[1], "link", "set", "weft-c1", "down")
        began_s = time.monotonic()
        statuses = [node.wait(HANG_S) for node in nodes]
        took_s = time.monotonic() - began_s
        lines = [log.read_text().splitlines()[-1] for log in logs[:2]]
        proof.claim(statuses == [1, 1], "a cable that is pulled ends both", statuses)
        proof.claim("node 1" in lines[0] and "node 0" in lines[1], "both say so", lines)
        print(f"     {took_s:.0f} s after it; {lines}")
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    return 1 if proof.num_failed else 0


def main(argv: Sequence[str] = ()) -> int:
    try:
        with two_hosts(), tempfile.TemporaryDirectory() as folder:
            return prove(Path(folder))
    except (OSError, subprocess.CalledProcessError) as exc:
        print(f"this machine does not let us make network namespaces: {exc}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Kills a server at random moments, with SIGKILL, while it answers a batch or, one in four times,
while it starts and reads what the one before it has left. In the end each line has exactly one
result.

    python -m tests.e2e.kill_batches --kills 100 --seed 1
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.kill_cache import MODEL, end
from tests.e2e.kills import run_kills
from tests.e2e.server import HANG_S, SMALL, Server

LINES_A_KILL = 150  # more than are answered before it
MAX_TOKENS = 40
PATH = "/v1/completions"
LONGEST_S = 2.0  # that a server answers before it is killed
START_S = 3.0  # a server that is killed while it starts has no longer


def lines(num_lines: int) -> bytes:
    found = []
    for index in range(num_lines):
        body = {"prompt": f"line {index}", "max_tokens": MAX_TOKENS, "ignore_eos": True}
        found.append({"custom_id": f"c{index}", "method": "POST", "url": PATH, "body": body})
    return "\n".join(map(json.dumps, found)).encode()


def begin(http: httpx.Client, num_lines: int) -> str:
    files = {"file": ("in.jsonl", lines(num_lines))}
    file = http.post("/v1/files", files=files, data={"purpose": "batch"}).json()
    body = {"input_file_id": file["id"], "endpoint": PATH, "completion_window": "24h"}
    return str(http.post("/v1/batches", json=body).json()["id"])


def run(folder: Path, num_kills: int, seed: int) -> list[int]:
    """Returns how many lines were there at each kill of a server that answered."""
    rng = random.Random(seed)
    options = (*MODEL, "--state-dir", str(folder / "state"))
    num_lines = LINES_A_KILL * num_kills
    counts: list[int] = []
    batch_id = ""
    for _ in range(num_kills):
        if batch_id and rng.random() < 0.25:
            _kill_starting(options, rng.uniform(0.0, START_S))
            continue
        server = Server(*options)
        try:
            with httpx.Client(base_url=server.url, timeout=HANG_S) as http:
                batch_id = batch_id or begin(http, num_lines)
                time.sleep(rng.uniform(0.0, LONGEST_S))
                batch = _batch(http, batch_id)
                assert batch["status"] in ("validating", "in_progress"), batch
                counts.append(batch["request_counts"]["completed"])
        finally:
            end(server)
    _finish(options, batch_id, num_lines)
    return counts


def _kill_starting(options: Sequence[str], after_s: float) -> None:
    command = [sys.executable, "-m", "weft", "serve", "--port", "0", *SMALL, *options]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    time.sleep(after_s)
    process.kill()
    process.wait()


def _finish(options: Sequence[str], batch_id: str, num_lines: int) -> None:
    """Answer the lines that are left, and look at the results of all."""
    server = Server(*options)
    try:
        with httpx.Client(base_url=server.url, timeout=HANG_S) as http:
            deadline = time.monotonic() + 10 * HANG_S
            while (batch := _batch(http, batch_id))["status"] != "completed":
                assert time.monotonic() < deadline, batch
                time.sleep(0.1)
            text = http.get(f"/v1/files/{batch['output_file_id']}/content").text
    finally:
        end(server)
    ids = Counter(json.loads(line)["custom_id"] for line in text.splitlines())
    assert ids == Counter(f"c{index}" for index in range(num_lines))
    assert batch["request_counts"] == {"total": num_lines, "completed": num_lines, "failed": 0}


def _batch(http: httpx.Client, id: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"/v1/batches/{id}").json()
    return found


def main() -> None:
    num, counts = run_kills(__doc__, run, 20)
    told = f"{num} kills, {num - len(counts)} of them of a server that started; each line once"
    print(f"{told}; lines at the other kills: {counts}")


if __name__ == "__main__":
    main()

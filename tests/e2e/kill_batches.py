"""Kills a server at random moments, with SIGKILL, while it answers a batch, and looks that each
line has exactly one result in the end.

    python -m tests.e2e.kill_batches --kills 20 --seed 1
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from pathlib import Path

import httpx

from tests.e2e.kill_cache import MODEL, end
from tests.e2e.kills import run_kills
from tests.e2e.server import HANG_S, Server

NUM_LINES = 4_000
MAX_TOKENS = 40
PATH = "/v1/completions"


def lines() -> bytes:
    found = []
    for index in range(NUM_LINES):
        body = {"prompt": f"line {index}", "max_tokens": MAX_TOKENS, "ignore_eos": True}
        found.append({"custom_id": f"c{index}", "method": "POST", "url": PATH, "body": body})
    return "\n".join(map(json.dumps, found)).encode()


def begin(http: httpx.Client) -> str:
    files = {"file": ("in.jsonl", lines())}
    file = http.post("/v1/files", files=files, data={"purpose": "batch"}).json()
    body = {"input_file_id": file["id"], "endpoint": PATH, "completion_window": "24h"}
    return str(http.post("/v1/batches", json=body).json()["id"])


def run(folder: Path, num_kills: int, seed: int) -> Counter[int]:
    """Returns how many lines were there at each kill, and, at last, at the end."""
    rng = random.Random(seed)
    counts = Counter[int]()
    batch_id = ""
    for number in range(num_kills + 1):
        server = Server(*MODEL, "--state-dir", str(folder / "state"))
        try:
            with httpx.Client(base_url=server.url, timeout=HANG_S) as http:
                batch_id = batch_id or begin(http)
                if number < num_kills:
                    time.sleep(rng.uniform(0.0, 0.6))
                    counts[_batch(http, batch_id)["request_counts"]["completed"]] += 1
                    continue
                deadline = time.monotonic() + HANG_S
                while (batch := _batch(http, batch_id))["status"] != "completed":
                    assert time.monotonic() < deadline, batch
                    time.sleep(0.1)
                text = http.get(f"/v1/files/{batch['output_file_id']}/content").text
                _check(text, batch)
                counts[NUM_LINES] += 1
        finally:
            end(server)
    return counts


def _batch(http: httpx.Client, id: str) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = http.get(f"/v1/batches/{id}").json()
    return found


def _check(text: str, batch: dict[str, dict[str, int]]) -> None:
    ids = Counter(json.loads(line)["custom_id"] for line in text.splitlines())
    assert ids == Counter(f"c{index}" for index in range(NUM_LINES))
    assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}


def main() -> None:
    num, counts = run_kills(__doc__, run, 20)
    print(f"{num} kills, each line once; lines at the kills: {sorted(counts)}")


if __name__ == "__main__":
    main()

"""Several models with real engines: random requests while models load, unload and are killed.

python -m tests.e2e.several_proof FOLDER [--requests 300] [--memory GB] [--seed N]

FOLDER is a --models-dir with at least three models. Each model first answers all of its prompts on
a server of its own. Then one server has them all. Every answer must be the same, or an error that
names a killed engine; the memory of all engines must stay within the budget.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.server import Server

PROMPTS = (
    "import os\n",
    "class Tree:\n    def __init__(",
    "def main() -> None:\n",
    "x = [",
    "try:\n",
)
SYSTEM = "# A long beginning that all prompts of a model have in common, for its cache. " * 6


def body(model: str, number: int) -> dict[str, Any]:
    prompt = SYSTEM + PROMPTS[number % len(PROMPTS)]
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": 8 + 4 * (number % 4),
        "temperature": 0.0 if number % 2 else 0.8,
        "seed": number,
    }


def alone(folder: Path, names: list[str], num: int) -> dict[tuple[str, int], str]:
    """The answers of each model on a server of its own."""
    found: dict[tuple[str, int], str] = {}
    for name in names:
        server = Server(str(folder / name))
        try:
            for number in range(num):
                answer = server.post("/v1/completions", **body(name, number))
                found[name, number] = answer["choices"][0]["text"]
        finally:
            server.stop()
    return found


def kept_answers(
    file: Path | None, folder: Path, names: list[str], num: int
) -> dict[tuple[str, int], str]:
    """The answers in the file; without it they are computed, and kept there."""
    if file is not None and file.exists():
        return {(name, number): text for name, number, text in json.loads(file.read_text())}
    found = alone(folder, names, num)
    if file is not None:
        file.write_text(json.dumps([(*key, text) for key, text in found.items()]))
    return found


def memory_of_engines(pid: int) -> int:
    """Proportional bytes of all engine processes."""
    num_bytes = 0
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            if "weft.launch.start_worker" in " ".join(child.cmdline()):
                num_bytes += child.memory_full_info().pss
    return num_bytes


class Proof:
    def __init__(self, server: Server, names: list[str], expected: dict[tuple[str, int], str]):
        self.server = server
        self.names = names
        self.expected = expected
        self.outcomes: Counter[str] = Counter()
        self.most_bytes = 0
        self.wrong: list[str] = []
        self.waits: list[float] = []

    async def ask(self, client: httpx.AsyncClient, name: str, number: int, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        began_s = time.monotonic()
        found = await client.post("/v1/completions", json=body(name, number))
        self.waits.append(time.monotonic() - began_s)
        if found.status_code != 200:
            text = found.json()["error"]["message"]
            self.outcomes[f"{found.status_code} {text[:60]}"] += 1
            if "SIGKILL" not in text and "send the request again" not in text:
                self.wrong.append(text)
            return
        self.outcomes["200"] += 1
        answer = found.json()["choices"][0]["text"]
        if answer != self.expected[name, number]:
            self.wrong.append(f"{name} {number}: {answer!r}")

    async def watch(self) -> None:
        while True:
            used = await asyncio.to_thread(memory_of_engines, self.server.process.pid)
            self.most_bytes = max(self.most_bytes, used)
            await asyncio.sleep(0.3)

    async def disturb(self, client: httpx.AsyncClient, rng: random.Random, last_s: float) -> None:
        until_s = time.monotonic() + last_s
        while time.monotonic() < until_s:
            await asyncio.sleep(rng.uniform(1.0, 4.0))
            name = rng.choice(self.names)
            if rng.random() < 0.6:
                self.outcomes["unload asked"] += 1
                await client.post("/models/unload", json={"model": name})
                continue
            engines = [
                one
                for one in psutil.Process(self.server.process.pid).children()
                if "start_worker" in " ".join(one.cmdline())
            ]
            if engines:
                self.outcomes["kill"] += 1
                rng.choice(engines).send_signal(signal.SIGKILL)

    async def run(self, num: int, last_s: float, seed: int, per_model: int) -> None:
        rng = random.Random(seed)
        limits = httpx.Limits(max_connections=400)
        async with httpx.AsyncClient(
            base_url=self.server.url, timeout=600, limits=limits
        ) as client:
            watching = asyncio.ensure_future(self.watch())
            disturbing = asyncio.ensure_future(self.disturb(client, rng, last_s * 0.8))
            asked = [
                self.ask(
                    client,
                    rng.choice(self.names),
                    rng.randrange(per_model),
                    rng.uniform(0.0, last_s),
                )
                for _ in range(num)
            ]
            await asyncio.gather(*asked)
            await disturbing
            watching.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--memory", type=float, default=1.6)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--per-model", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answers", type=Path, help="file with the answers of the models alone")
    args = parser.parse_args()
    names = sorted(entry.name for entry in args.folder.iterdir())[:3]
    expected = kept_answers(args.answers, args.folder, names, args.per_model)
    assert len({expected[name, 1] for name in names}) == len(names), "the models answer alike"
    with tempfile.TemporaryDirectory() as cache:
        options = ("--models-dir", str(args.folder), "--memory", str(args.memory))
        server = Server(*options, "--cache-dir", cache)
        proof = Proof(server, names, expected)
        try:
            asyncio.run(proof.run(args.requests, args.seconds, args.seed, args.per_model))
            for name in names:
                loaded = server.get("/models")["data"]
                if any(one["id"] == name and one["status"]["value"] == "loaded" for one in loaded):
                    faults = server.post(f"/audit?model={name}")["faults"]
                    assert not faults, faults
        finally:
            status = server.stop()
    proof.waits.sort()
    print(dict(proof.outcomes), f"exit {status}")
    print(f"most memory of engines: {proof.most_bytes / 1e9:.3f} of {args.memory} GB")
    print(f"longest answers: {[round(one, 2) for one in proof.waits[-3:]]}")
    print(f"wrong: {proof.wrong[:5]}")
    return bool(proof.wrong or status or proof.most_bytes > args.memory * 1e9)


if __name__ == "__main__":
    sys.exit(main())

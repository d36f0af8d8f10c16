"""Whether running requests notice that a block of the input ends with a ramp.

    python benchmarks/ramp.py [MODEL] --rest 0.5 --block 30

Starts a server, measures how many requests a second it can serve, and then sends the part `--rest` of that all the time.
The input is blocked for `--block` seconds, in which twice of what the server can do arrives, and opened with a ramp by
the rule of docs/guides/control.md: three times the time that the server needs for what has waited, beside what goes on
arriving. Printed: the time between two tokens of one request before, during the ramp, and after it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import NamedTuple

import httpx
import msgspec
import numpy as np
from servers import served

from weft.bench.http import HttpClient, HttpError, Take
from weft.sim.table import table

PROMPT = 200
OUTPUT = 32
NUM_AT_ONCE = 48  # while the capacity is measured
CAPACITY_S = 12.0
BEFORE_S = 30.0
AFTER_S = 15.0
RULE = 3.0


class Scene(NamedTuple):
    """Rates in requests a second; times since the beginning in seconds."""

    rest: float
    flood: float
    block_s: float
    unblock_s: float
    end_s: float


def body(rng: random.Random) -> bytes:
    ids = [rng.randrange(300, 1_000) for _ in range(PROMPT)]
    return msgspec.json.encode(
        {"prompt": ids, "max_tokens": OUTPUT, "ignore_eos": True, "stream": True}
    )


async def ask(client: HttpClient, content: bytes, take: Take) -> bool:
    try:
        await client.stream("/v1/completions", content, take)
    except (HttpError, OSError):
        return False
    return True


async def capacity(url: str) -> float:
    """Requests a second when there are always some that wait."""
    client = HttpClient(url)
    end_s = time.perf_counter() + CAPACITY_S
    num_ended = 0

    async def loop(seed: int) -> None:
        nonlocal num_ended
        rng = random.Random(seed)
        while time.perf_counter() < end_s:
            is_answered = await ask(client, body(rng), lambda data: None)
            num_ended += is_answered

    began_s = time.perf_counter()
    await asyncio.gather(*(loop(1_000 + seed) for seed in range(NUM_AT_ONCE)))
    return num_ended / (time.perf_counter() - began_s)


class Traffic:
    """Requests at the rates of a scene, and when their tokens came."""

    def __init__(self, url: str, scene: Scene) -> None:
        self._client = HttpClient(url)
        self._scene = scene
        self.began_s = time.perf_counter()
        self.gaps: list[tuple[float, float]] = []  # (when, how long) in seconds

    async def play(self) -> str:
        """Send all, and wait for the answers. Returns what became of them."""
        scene = self._scene
        rng = random.Random(1)
        tasks = []
        due_s = 0.0
        while due_s < scene.end_s:
            await asyncio.sleep(max(self.began_s + due_s - time.perf_counter(), 0.0))
            content = body(rng)
            tasks.append(asyncio.create_task(ask(self._client, content, self._noting())))
            is_blocked = scene.block_s <= due_s < scene.unblock_s
            due_s += rng.expovariate(scene.flood if is_blocked else scene.rest)
        answered = sum(await asyncio.gather(*tasks))
        return f"{answered} of {len(tasks)} requests answered"

    def percentiles(self, since_s: float, until_s: float) -> list[str]:
        gaps = [1_000 * gap for at, gap in self.gaps if since_s < at <= until_s]
        return [f"{np.percentile(gaps, share):.1f}" for share in (50, 90, 99)]

    def _noting(self) -> Take:
        last_s = 0.0

        def take(data: bytes) -> None:
            nonlocal last_s
            now = time.perf_counter() - self.began_s
            if last_s and data != b"[DONE]":
                self.gaps.append((now, now - last_s))
            last_s = now

        return take


async def play(url: str, asked: argparse.Namespace) -> None:
    most = await capacity(url)
    rest = asked.rest * most
    flood = 2 * most
    ramp_s = asked.ramp or RULE * asked.block * flood / (most - rest)
    unblock_s = BEFORE_S + asked.block
    ramp_end_s = unblock_s + ramp_s
    scene = Scene(rest, flood, BEFORE_S, unblock_s, ramp_end_s + AFTER_S)
    print(f"{most:.1f} requests/s at most; ramp of {ramp_s:.0f} s", flush=True)
    traffic = Traffic(url, scene)
    playing = asyncio.create_task(traffic.play())
    async with httpx.AsyncClient(base_url=url, timeout=60) as control:
        await asyncio.sleep(traffic.began_s + scene.block_s - time.perf_counter())
        await control.post("/block")
        await asyncio.sleep(traffic.began_s + scene.unblock_s - time.perf_counter())
        reply = await control.post("/unblock", params={"ramp_s": f"{ramp_s:.0f}"})
        print(f"{reply.json()['held_requests']} requests were blocked", flush=True)
    print(await playing, flush=True)
    spans = {"before": (2.0, scene.block_s), "ramp": (unblock_s, ramp_end_s)}
    for number in range(4):
        since_s = unblock_s + number * ramp_s / 4
        spans[f"quarter {number + 1} of the ramp"] = (since_s, since_s + ramp_s / 4)
    spans["after"] = (ramp_end_s, scene.end_s)
    rows = [[name, *traffic.percentiles(*span)] for name, span in spans.items()]
    print(table(["", "p50 ms", "p90 ms", "p99 ms"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Requests beside an input that is opened.")
    parser.add_argument("model", nargs="?", default="weft-nano")
    parser.add_argument("--rest", type=float, default=0.5, help="part of the capacity that comes")
    parser.add_argument("--block", type=float, default=30.0, help="seconds")
    parser.add_argument("--ramp", type=float, default=0.0, help="seconds; 0: by the rule")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--more", default="", help="further options of weft serve")
    asked = parser.parse_args()
    options = ["--threads", asked.threads, "--no-page", *asked.more.split()]
    with served("serve", asked.model, *options) as server:
        asyncio.run(play(server.url, asked))


if __name__ == "__main__":
    main()

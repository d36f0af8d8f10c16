"""Chats beside a batch on one server: what the batch costs them, and what both compute together.

    python benchmarks/background.py [MODEL] --rounds 2 --seconds 20

Chats come at a share of the rate that the server answers of them when it has nothing else to do; lines of the batch
have the lengths of the chats. In turns: chats alone, the batch alone, both. Tokens are those that the engine counts in
the same time: generated ones, and with those of prompts that it computed. With --simulate, the server keeps a journal,
and each part is simulated with the cost of its steps: figures and ratios of simulated to measured ones.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import background_simulated as simulated
import httpx
import numpy as np
from background_simulated import Chat, PartLoad
from servers import served

from weft.bench.http import HttpClient
from weft.bench.serving import FIRST_ID, LAST_ID, ServingLoad, ServingRun, run
from weft.bench.workloads import RequestShape
from weft.sim.table import number, table

PATH = "/v1/completions"
RAMP_S = 3.0  # until a batch has filled its rows
IDLE_S = 0.05  # from one look whether the server is idle to the next
SIGMA = 0.4  # of the lengths, which are lognormal
CONCURRENCY = 32  # of the chats that show what the server can answer


class Figures(NamedTuple):
    """Of one part of a round. Times are in milliseconds; NaN without chats."""

    itl_p50: float
    itl_p99: float
    ttft_mean: float
    ttft_p99: float
    output_per_s: float
    computed_per_s: float
    seconds: float


class Scene:
    """The server, and the load of each part."""

    def __init__(self, asked: argparse.Namespace, url: str) -> None:
        self._asked = asked
        self._http = httpx.Client(base_url=url, timeout=60.0)
        self._client = HttpClient(url)
        self._lines = self.shapes(asked.lines, random.Random(asked.seed))
        self.loads: list[PartLoad] = []  # of the parts so far

    def shapes(self, num: int, rng: random.Random) -> list[RequestShape]:
        found = []
        for _ in range(num):
            prompt_len = drawn(rng, self._asked.input_len)
            found.append(RequestShape(0, prompt_len, drawn(rng, self._asked.output_len)))
        return found

    def chats(self, num: int, seed: int, **pace: Any) -> ServingRun:
        """Answer chats, and wait for the last one. Those of one seed come at the same times."""
        shapes = self.shapes(num, random.Random(seed))
        load = ServingLoad(
            num_requests=num,
            input_len=0,
            output_len=0,
            jobs=shapes,
            seed=seed,
            counts_events=True,
            **pace,
        )
        return asyncio.run(run(self._client, load))

    def batch(self) -> str:
        """Begin a batch. Returns its id."""
        rng = random.Random(self._asked.seed)
        lines = []
        for index, shape in enumerate(self._lines):
            prompt = [rng.randrange(FIRST_ID, LAST_ID) for _ in range(shape.own_len)]
            body = {"prompt": prompt, "max_tokens": shape.output_len, "ignore_eos": True}
            lines.append(json.dumps({"custom_id": f"{index}", "url": PATH, "body": body}))
        files = {"file": ("in.jsonl", "\n".join(lines).encode())}
        file = self._http.post("/v1/files", files=files, data={"purpose": "batch"}).json()
        wanted = {"input_file_id": file["id"], "endpoint": PATH, "completion_window": "24h"}
        id: str = self._http.post("/v1/batches", json=wanted).raise_for_status().json()["id"]
        time.sleep(RAMP_S)
        return id

    def end(self, batch: str) -> None:
        state = self._http.get(f"/v1/batches/{batch}").json()
        if state["status"] != "in_progress":
            raise RuntimeError(f"the batch was too short: {state['request_counts']}")
        self._http.post(f"/v1/batches/{batch}/cancel").raise_for_status()
        while self.stats()["num_running"] or self.stats()["num_waiting"]:
            time.sleep(IDLE_S)

    def stats(self) -> dict[str, float]:
        found: dict[str, float] = self._http.get("/v1/loads").json()["loads"][0]["stats"]
        return found

    def part(self, seed: int, *, chats: bool, batch: bool, rate: float) -> Figures:
        self._http.post("/flush_cache").raise_for_status()
        id = self.batch() if batch else ""
        before = self.stats()
        began = time.perf_counter()
        num_chats = max(round(rate * self._asked.seconds), 1) if chats else 0
        if chats:
            found = self.chats(num_chats, seed, rate=rate)
        else:
            found = ServingRun(calls=[], total_s=0.0)
            time.sleep(self._asked.seconds)
        after = self.stats()
        seconds = time.perf_counter() - began
        if batch:
            self.end(id)
        grown = {name: after[name] - before[name] for name in after if name.startswith("total")}
        output = grown["total_generated_tokens"]
        computed = output + grown["total_prefilled_tokens"]
        self.loads.append(
            PartLoad(
                chats=chats_of(found, self.shapes(num_chats, random.Random(seed))),
                lines=self._lines if batch else (),
                before_s=RAMP_S,
                itl=itl_of([gap for call in found.calls for gap in call.token_itl_s]),
                output_per_s=output / seconds,
                seconds=seconds,
            )
        )
        return Figures(*times_of(found), output / seconds, computed / seconds, seconds)


def times_of(found: ServingRun) -> list[float]:
    failed = [call.error for call in found.calls if call.error]
    if failed:
        raise RuntimeError(f"{len(failed)} chats failed: {failed[0]}")
    if not found.calls:
        return [float("nan")] * 4
    gaps = [gap for call in found.calls for gap in call.itl_s]
    first = 1e3 * np.array([call.ttft_s for call in found.calls])
    return [*itl_of(gaps), float(first.mean()), float(np.percentile(first, 99))]


def itl_of(gaps_s: list[float]) -> tuple[float, float]:
    """p50 and p99 in milliseconds; NaN without any."""
    if not gaps_s:
        return float("nan"), float("nan")
    p50, p99 = 1e3 * np.percentile(gaps_s, [50, 99])
    return float(p50), float(p99)


def chats_of(found: ServingRun, shapes: Sequence[RequestShape]) -> list[Chat]:
    if not shapes:
        return []
    first_s = min(call.sent_s for call in found.calls)
    pairs = zip(found.calls, shapes, strict=True)
    chats = [Chat(call.sent_s - first_s, shape) for call, shape in pairs]
    return sorted(chats, key=lambda chat: chat.sent_s)


def compare(names: list[str], loads: list[PartLoad], measured: list[Figures], path: Path) -> None:
    """Print what a simulation says of each part, and by how much it differs."""
    machine = simulated.read(path)
    rows = []
    for name, load, real in zip(names, loads, measured, strict=True):
        said = simulated.figures(machine, load)
        # A simulation counts each token; clients see those of one step as one event.
        seen = (*load.itl, real.ttft_mean, real.output_per_s)
        ratios = [ours / theirs for ours, theirs in zip(said, seen, strict=True)]
        rows.append([name, *map(number, said), *map(times, ratios)])
    header = ["simulated", "ITL p50, ms", "p99", "TTFT mean, ms", "output/s"]
    print(table([*header, "p50", "p99", "TTFT", "output"], rows))


def times(ratio: float) -> str:
    return "-" if np.isnan(ratio) else f"{ratio:.2f} x"


def drawn(rng: random.Random, mean: float) -> int:
    return max(round(rng.lognormvariate(np.log(mean) - SIGMA**2 / 2, SIGMA)), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Chats beside a batch.")
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each part of a round")
    parser.add_argument("--rate", type=float, default=0.0, help="of chats; 0: by --load")
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--input-len", type=float, default=120)
    parser.add_argument("--output-len", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--simulate", action="store_true", help="compare with weft sim")
    asked, options = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end the server
    words = ["serve", *([asked.model] if asked.model else []), "--no-page", *options]
    folder = tempfile.TemporaryDirectory()
    journal = Path(folder.name) / "parts.journal"
    if asked.simulate:
        words += ["--journal", str(journal)]
    names: list[str] = []
    parts: dict[str, list[Figures]] = {"chats alone": [], "batch alone": [], "both": []}
    with served(*words) as server:
        scene = Scene(asked, server.url)
        # What is done first takes longer. Its prompts are in the cache then, so others follow.
        scene.chats(CONCURRENCY, asked.seed - 1, concurrency=CONCURRENCY)
        rate = asked.rate
        if not rate:
            fastest = scene.chats(6 * CONCURRENCY, asked.seed, concurrency=CONCURRENCY)
            rate = asked.load * fastest.requests_per_s
        print(f"chats come {rate:.2f} times a second", flush=True)
        for number_of_round in range(1, asked.rounds + 1):
            for name, found in parts.items():
                is_chat = name != "batch alone"
                is_batch = name != "chats alone"
                seed = asked.seed + number_of_round
                found.append(scene.part(seed, chats=is_chat, batch=is_batch, rate=rate))
                names.append(name)
                print(name, *map(number, found[-1]), flush=True)
    header = ["", "ITL p50, ms", "p99", "TTFT mean, ms", "p99", "output/s", "with prompts", "s"]
    means = {name: Figures(*np.mean(found, axis=0).tolist()) for name, found in parts.items()}
    print(table(header, [[name, *map(number, figures)] for name, figures in means.items()]))
    chats, batch, both = means.values()
    print(
        f"both: ITL p99 {both.itl_p99 / chats.itl_p99:.2f} x, "
        f"TTFT {both.ttft_mean / chats.ttft_mean:.2f} x, "
        f"output {both.output_per_s / batch.output_per_s:.3f} x, "
        f"computed {both.computed_per_s / batch.computed_per_s:.3f} x"
    )
    if asked.simulate:
        measured = [figures for turn in zip(*parts.values(), strict=True) for figures in turn]
        compare(names, scene.loads, measured, journal)
    folder.cleanup()


if __name__ == "__main__":
    main()

"""Whether requests wait as long as they were told: of those with a deadline for their first token, how many had it within the
band that the server gave them when they came.

    python benchmarks/waits.py [MODEL] --loads light,saturated,bursts,long --requests 1000

Starts a server that records a journal, measures what it can do, and sends requests over time: chats and texts of all
lengths, outputs that end by themselves and outputs of a given length, most of them with a deadline. The answers'
x-weft-wait-ms is compared with the first token, by the clock of the client and, from the journal, by that of the engine;
and the journal is simulated with the costs that are fitted to it.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import numpy as np
from servers import served

from weft.bench.http import HttpClient, HttpError
from weft.engine.deadline_service import DeadlineService
from weft.journal.file import JournalReader
from weft.journal.replay import Replay
from weft.sim.fit import fit_usual
from weft.sim.journal import read_journal
from weft.sim.run import simulate
from weft.sim.table import table

ANY_TIME_MS = 3_600_000
WAIT_HEADER = "x-weft-wait-ms"
NUM_WARM = 32  # requests at once, by which the rate is chosen
LIBRARY = ("argparse", "asyncio.tasks", "calendar", "difflib", "inspect", "pathlib", "textwrap")


class Load(NamedTuple):
    """How requests come. `part`: of what the server can do."""

    part: float
    at_once: int = 1
    output_scale: float = 1.0


LOADS = {
    "light": Load(0.4),
    "busy": Load(0.8),
    "saturated": Load(1.15),
    "bursts": Load(0.7, at_once=30),
    "floods": Load(2.0, at_once=350),
    "long": Load(0.9, output_scale=4.0),
}


@dataclass
class Asked:
    """A request, and what came of it."""

    path: str
    body: dict[str, Any]
    low_ms: float = math.nan
    high_ms: float = math.nan
    head_ms: float = math.nan  # when the answer began
    first_ms: float = math.nan  # when the first text was there
    end_s: float = 0.0
    error: str = ""

    @property
    def was_told(self) -> bool:
        return self.low_ms == self.low_ms and self.first_ms == self.first_ms

    @property
    def is_within(self) -> bool:
        return self.low_ms <= self.first_ms <= self.high_ms


class Texts:
    """Pieces of Python's library, and questions about them."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        sources = []
        for name in LIBRARY:
            module = __import__(name, fromlist=["_"])
            sources.append(Path(module.__file__).read_text(encoding="utf-8"))
        self._source = "\n".join(sources)
        self._shared = self._piece(1_200)

    def request(self, output_scale: float) -> Asked:
        rng = self._rng
        text = self._piece(int(min(rng.lognormvariate(5.0, 0.9), 3_000)))
        num_new = max(int(min(output_scale * rng.lognormvariate(2.5, 0.7), 400)), 4)
        body: dict[str, Any] = {"stream": True, "temperature": 1.0, "seed": rng.randrange(1 << 30)}
        deadline = rng.random()
        if deadline < 0.85:
            body["ttft_ms"] = ANY_TIME_MS
        elif deadline < 0.93:
            body["ttft_ms"] = int(rng.lognormvariate(7.5, 1.0))
        if rng.random() < 0.5:
            body |= {"prompt": text, "max_tokens": num_new, "ignore_eos": True}
            return Asked("/v1/completions", body)
        messages = [{"role": "user", "content": f"What does this do?\n{text}"}]
        if rng.random() < 0.4:
            messages.insert(0, {"role": "system", "content": self._shared})
        # Such an answer ends by itself, mostly long before.
        body |= {"messages": messages, "max_tokens": int(64 * output_scale)}
        return Asked("/v1/chat/completions", body)

    def _piece(self, length: int) -> str:
        start = self._rng.randrange(len(self._source) - length)
        return self._source[start : start + length]


class ServedRun:
    """A server, a load, and what its clients saw."""

    def __init__(self, asked: argparse.Namespace, load: Load, journal: Path) -> None:
        self._asked = asked
        self._load = load
        self._journal = journal
        self._client: HttpClient
        self._texts = Texts(asked.seed)
        self.rate = 0.0  # requests a second

    def play(self) -> list[Asked]:
        asked = self._asked
        options = ["--journal", str(self._journal), "--journal-max-mb", "2048", "--no-page"]
        options += ["--max-running-requests", str(asked.rows), "--threads", str(asked.threads)]
        with served("serve", asked.model, *options, *asked.more.split()) as server:
            self._client = HttpClient(server.url)
            return asyncio.run(self._play())

    async def _play(self) -> list[Asked]:
        for _ in range(2):
            warm = [self._texts.request(self._load.output_scale) for _ in range(NUM_WARM)]
            for one in warm:
                one.body.pop("ttft_ms", None)
            began_s = time.perf_counter()
            await asyncio.gather(*map(self._ask, warm))
            capacity = NUM_WARM / (time.perf_counter() - began_s)
        self.rate = self._load.part * capacity
        sent = [self._texts.request(self._load.output_scale) for _ in range(self._asked.requests)]
        rng = random.Random(self._asked.seed)
        tasks = []
        due_s = time.perf_counter()
        last_s = due_s + self._asked.seconds
        for number, one in enumerate(sent):
            if due_s > last_s:
                sent = sent[:number]
                break
            if number % self._load.at_once == 0:
                due_s += rng.expovariate(self.rate / self._load.at_once)
            await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
            tasks.append(asyncio.create_task(self._ask(one)))
        await asyncio.gather(*tasks)
        return sent

    async def _ask(self, one: Asked) -> None:
        began_s = time.perf_counter()

        def take(data: bytes) -> None:
            if one.first_ms != one.first_ms and _has_text(data):
                one.first_ms = 1_000 * (time.perf_counter() - began_s)

        def head(headers: dict[str, str]) -> None:
            one.head_ms = 1_000 * (time.perf_counter() - began_s)
            band = headers.get(WAIT_HEADER, "")
            if band:
                low, _, high = band.partition("-")
                one.low_ms = float(low)
                one.high_ms = float(high)

        try:
            await self._client.stream(one.path, msgspec.json.encode(one.body), take, head=head)
        except HttpError as exc:
            one.error = str(exc)
        one.end_s = time.perf_counter()


def _has_text(data: bytes) -> bool:
    """Whether an event has text of the answer: the first one of a chat has only its role."""
    if data == b"[DONE]":
        return False
    for choice in msgspec.json.decode(data).get("choices", ()):
        delta = choice.get("delta", choice)
        if delta.get("content") or delta.get("text"):
            return True
    return False


class Share(NamedTuple):
    """How many of so many lie within their bands."""

    num_within: int
    num_told: int

    @property
    def text(self) -> str:
        if not self.num_told:
            return "-"
        return f"{self.num_within / self.num_told:.1%} of {self.num_told:,}"


def of_clients(sent: Sequence[Asked]) -> Share:
    told = [one for one in sent if one.was_told]
    return Share(sum(one.is_within for one in told), len(told))


def of_engine(journal: Path) -> Share:
    """By the engine's own clock."""
    with JournalReader(journal) as reader:
        replay = Replay(reader)
        replay.run()
    if replay.difference is not None:
        print(f"the journal differs: {replay.difference}", file=sys.stderr)
    service: DeadlineService = replay.engine.services.deadlines
    return Share(service.calibration.num_within, service.calibration.num_seen)


def of_simulation(journal: Path) -> Share:
    """The same requests in virtual time, on the cost of the recorded steps."""
    with JournalReader(journal) as reader:
        found = read_journal(reader)
    cost = fit_usual(found.steps).cost
    record = simulate(
        found.settings, cost, found.arrivals, overlap=found.overlaps, speed=found.speed(cost)
    )
    return Share(record.machine.num_within, record.machine.num_expected)


def main() -> None:
    parser = argparse.ArgumentParser(description="Waits that were told, and those that came.")
    parser.add_argument("model", nargs="?", default="weft-nano")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--requests", type=int, default=1_120)
    parser.add_argument("--seconds", type=float, default=3_600, help="send for so long at most")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", default="", help="folder for the journals")
    parser.add_argument("--more", default="", help="more options of weft serve")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end the server
    header = ["load", "req/s", "refused", "first token p50, p99", "told low, high p50"]
    header += ["within: client", "engine", "simulated"]
    rows = []
    with TemporaryDirectory() as temporary:
        folder = Path(asked.keep or temporary)
        for name in asked.loads.split(","):
            journal = folder / f"{name}.journal"
            run = ServedRun(asked, LOADS[name], journal)
            sent = run.play()
            rows.append(row_of(name, run, sent, journal))
            print(*rows[-1], sep=" | ", flush=True)
    print(table(header, rows))


def row_of(name: str, run: ServedRun, sent: Sequence[Asked], journal: Path) -> list[str]:
    told = [one for one in sent if one.was_told]
    first_ms = np.array([one.first_ms for one in told])
    low_ms = np.median([one.low_ms for one in told])
    high_ms = np.median([one.high_ms for one in told])
    return [
        name,
        f"{run.rate:.1f}",
        f"{sum('503' in one.error for one in sent)}",
        f"{np.median(first_ms):,.0f}, {np.percentile(first_ms, 99):,.0f} ms",
        f"{low_ms:,.0f}, {high_ms:,.0f} ms",
        of_clients(sent).text,
        of_engine(journal).text,
        of_simulation(journal).text,
    ]


if __name__ == "__main__":
    main()

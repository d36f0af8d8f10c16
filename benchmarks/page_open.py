"""What it costs that somebody looks at the live page: tokens a second and the seconds of CPU of engine and front for the
same requests with no viewer and with some, in many short turns, and how soon a viewer has the first picture.

    python benchmarks/page_open.py [--model weft-nano] [--rounds 30] [--viewers 1,10]

Each turn with viewers is compared with the turns without that stand before and behind it. The seconds of CPU do not depend on
what else the machine does, or hardly.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import math
import statistics
import subprocess
import sys
import time

import httpx
import psutil
from servers import served

NUM_REQUESTS = 8
NUM_TOKENS = 250


async def tokens_per_s(client: httpx.AsyncClient) -> float:
    """Of requests that decode together."""

    async def ask(number: int) -> int:
        body = {
            "prompt": f"{number} words:",
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "seed": number,
        }
        answer = await client.post("/v1/completions", json=body)
        return int(answer.raise_for_status().json()["usage"]["completion_tokens"])

    began_s = time.perf_counter()
    counts = await asyncio.gather(*(ask(number) for number in range(NUM_REQUESTS)))
    return sum(counts) / (time.perf_counter() - began_s)


def look(address: str) -> None:
    """Read pictures until killed; the milliseconds until the first one are printed."""
    began_s = time.perf_counter()
    connection = http.client.HTTPConnection(address)
    connection.request("GET", "/events")
    answer = connection.getresponse()
    has_come = False
    while piece := answer.read1(1 << 20):
        if not has_come and b"event: picture" in piece:
            has_come = True
            print(1_000 * (time.perf_counter() - began_s), flush=True)


class Viewers:
    """So many at a time, each a process of its own, as browsers are."""

    def __init__(self, address: str, number: int) -> None:
        """When each has its first picture."""
        command = [sys.executable, __file__, "--look", address]
        self._processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(number)
        ]
        self.firsts_ms = [float(one.stdout.readline()) for one in self._processes if one.stdout]

    def leave(self) -> None:
        for one in self._processes:
            one.kill()
            one.communicate()


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


class Turns:
    """What was measured with so many viewers."""

    def __init__(self) -> None:
        self.rates: list[float] = []  # tokens a second
        self.spent_s: dict[str, float] = {}  # of CPU, by the process

    async def take(self, client: httpx.AsyncClient, processes: dict[str, psutil.Process]) -> None:
        before = {name: cpu_s(process) for name, process in processes.items()}
        self.rates.append(await tokens_per_s(client))
        for name, process in processes.items():
            spent_s = cpu_s(process) - before[name]
            self.spent_s[name] = self.spent_s.get(name, 0.0) + spent_s

    def cpu_us(self, name: str) -> float:
        """Microseconds of a token."""
        return 1e6 * self.spent_s[name] / (len(self.rates) * NUM_REQUESTS * NUM_TOKENS)


async def measure(
    url: str, rounds: int, numbers: list[int], processes: dict[str, psutil.Process]
) -> None:
    alone = Turns()
    watched = {num: Turns() for num in numbers}
    firsts_ms: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await tokens_per_s(client)
        await alone.take(client, processes)
        for _ in range(rounds):
            for num, turns in watched.items():
                viewers = Viewers(url.removeprefix("http://"), num)
                firsts_ms += viewers.firsts_ms
                await turns.take(client, processes)
                viewers.leave()
                await alone.take(client, processes)
    print(f"nobody: {statistics.median(alone.rates):,.0f} tokens/s, {told(alone, alone)}")
    for place, (num, turns) in enumerate(watched.items()):
        ratios = []
        for number, rate in enumerate(turns.rates):
            before = number * len(watched) + place
            ratios.append(2 * rate / (alone.rates[before] + alone.rates[before + 1]))
        low, middle, high = median_within(ratios)
        print(
            f"{num} viewers: {statistics.median(turns.rates):,.0f} tokens/s, {middle:.3f} times those of "
            f"nobody ({low:.3f} to {high:.3f} with 95 %, {rounds} turns); {told(turns, alone)}"
        )
    print(
        f"first picture: median {statistics.median(firsts_ms):.1f} ms, at most {max(firsts_ms):.1f} ms"
    )


def told(turns: Turns, alone: Turns) -> str:
    words = []
    for name in alone.spent_s:
        ratio = turns.cpu_us(name) / max(alone.cpu_us(name), 1e-9)
        words.append(f"{name} {turns.cpu_us(name):.1f} us of CPU a token ({ratio:.3f} times)")
    return ", ".join(words)


def median_within(values: list[float]) -> tuple[float, float, float]:
    """The median between the values that enclose it in 95 of 100 such measurements."""
    ordered = sorted(values)
    reach = 0.98 * math.sqrt(len(ordered))
    first = max(int(len(ordered) / 2 - reach), 0)
    return ordered[first], statistics.median(ordered), ordered[-1 - first]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="weft-nano")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--viewers", default="1,10", help="how many look at a time, with commas")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--look", metavar="ADDRESS", help="be a viewer")
    args = parser.parse_args()
    if args.look:
        look(args.look)
        return
    with served("serve", args.model, "--threads", str(args.threads)) as server:
        front = psutil.Process(server.process.pid)
        (engine,) = [one for one in front.children() if "worker" in " ".join(one.cmdline())]
        processes = {"engine": engine, "front": front}
        numbers = [int(number) for number in args.viewers.split(",")]
        asyncio.run(measure(server.url, args.rounds, numbers, processes))


if __name__ == "__main__":
    main()

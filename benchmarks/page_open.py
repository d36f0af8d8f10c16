"""What it costs that somebody looks at the live page: tokens a second and the seconds of CPU of engine and front for the
same requests with no viewer and with some, in many short turns, and how soon a viewer has the first picture.

    python benchmarks/page_open.py [--model weft-nano] [--rounds 30] [--viewers 1,10] [--repeats 1]

Each turn with viewers is compared with the turns without that stand before and behind it. The seconds of CPU do not depend on
what else the machine does, or hardly.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import selectors
import socket
import statistics
import subprocess
import sys
import time

import httpx
import psutil
from servers import served

NUM_REQUESTS = 8
NUM_TOKENS = 250
SETTLE_S = 1.0  # before a turn, in which the server notices who has come and gone


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


def look(address: str, number: int) -> None:
    """Read the pictures of so many viewers until killed; the milliseconds until each has its first
    one are printed."""
    host, port = address.split(":")
    began_s = time.perf_counter()
    selector = selectors.DefaultSelector()
    for _ in range(number):
        viewer = socket.create_connection((host, int(port)))
        viewer.sendall(f"GET /events HTTP/1.1\r\nhost: {address}\r\n\r\n".encode())
        selector.register(viewer, selectors.EVENT_READ)
    seen = set()
    begun: dict[int, bytes] = {}  # what came before the first picture
    while True:
        for key, _ in selector.select():
            piece = key.fileobj.recv(1 << 18)
            if not piece:
                raise SystemExit("the server has closed a stream of pictures")
            if key.fd in seen:
                continue
            begun[key.fd] = begun.get(key.fd, b"") + piece
            if b"event: picture" in begun[key.fd]:
                seen.add(key.fd)
                del begun[key.fd]
                print(1_000 * (time.perf_counter() - began_s), flush=True)


class Viewers:
    """So many at a time, in a process of their own, as browsers are."""

    def __init__(self, address: str, number: int) -> None:
        """When each has its first picture."""
        command = [sys.executable, __file__, "--look", address, "--viewers", str(number)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.firsts_ms = [float(self._process.stdout.readline()) for _ in range(number)]

    def leave(self) -> None:
        self._process.kill()
        self._process.communicate()


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


class Turns:
    """What was measured with so many viewers."""

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats  # of the requests of a turn
        self.rates: list[float] = []  # tokens a second
        self.spent_s: dict[str, float] = {}  # of CPU, by the process

    async def take(self, client: httpx.AsyncClient, processes: dict[str, psutil.Process]) -> None:
        await asyncio.sleep(SETTLE_S)
        before = {name: cpu_s(process) for name, process in processes.items()}
        rates = [await tokens_per_s(client) for _ in range(self._repeats)]
        self.rates.append(statistics.mean(rates))
        for name, process in processes.items():
            spent_s = cpu_s(process) - before[name]
            self.spent_s[name] = self.spent_s.get(name, 0.0) + spent_s

    def cpu_us(self, name: str) -> float:
        """Microseconds of a token."""
        tokens = len(self.rates) * self._repeats * NUM_REQUESTS * NUM_TOKENS
        return 1e6 * self.spent_s[name] / tokens


async def measure(url: str, args: argparse.Namespace, processes: dict[str, psutil.Process]) -> None:
    rounds = args.rounds
    alone = Turns(args.repeats)
    watched = {int(num): Turns(args.repeats) for num in args.viewers.split(",")}
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
    parser.add_argument("--repeats", type=int, default=1, help="how often a turn asks")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--look", metavar="ADDRESS", help="be a viewer")
    args = parser.parse_args()
    if args.look:
        look(args.look, int(args.viewers))
        return
    with served("serve", args.model, "--threads", str(args.threads)) as server:
        front = psutil.Process(server.process.pid)
        (engine,) = [one for one in front.children() if "worker" in " ".join(one.cmdline())]
        processes = {"engine": engine, "front": front}
        asyncio.run(measure(server.url, args, processes))


if __name__ == "__main__":
    main()

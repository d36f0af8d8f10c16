"""Two servers of one model with other options, asked in turns: how many times the tokens a second of the second the
first one has.

    python benchmarks/turns.py weft-nano --ours "--dp-size 2 --threads 1" --other "--threads 2"
    python benchmarks/turns.py FOLDER --ours "--tp-size 2 --threads 1" --other "--threads 2" --requests 1

Each round has prompts of its own, so nothing of them is in a cache. `weft bench shape 0.6b` makes a FOLDER.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

HIGHEST_ID = 1_000  # of random prompts; every model has as many tokens


@contextmanager
def served(model: str, options: str, port: int) -> Iterator[str]:
    """The URL of a server that is ready. Raises RuntimeError if it ends instead."""
    command = [sys.executable, "-m", "weft", "serve", model, "--port", str(port)]
    server = subprocess.Popen([*command, "--log-level", "error", *shlex.split(options)])
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            if server.poll() is not None:
                raise RuntimeError(f"the server with {options} has ended")
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait()


async def tokens_per_s(url: str, number: int, asked: argparse.Namespace) -> float:
    """Output of requests that come at once, by the seconds until the last has ended."""
    draw = random.Random(number)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def ask() -> int:
            prompt = [draw.randrange(1, HIGHEST_ID) for _ in range(asked.input_len)]
            body = {"prompt": prompt, "max_tokens": asked.output_len, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=body)
            return int(answer.raise_for_status().json()["usage"]["completion_tokens"])

        began_s = time.perf_counter()
        counts = await asyncio.gather(*(ask() for _ in range(asked.requests)))
        return sum(counts) / (time.perf_counter() - began_s)


async def measure(ours: str, other: str, asked: argparse.Namespace) -> None:
    ratios: list[float] = []
    for number in range(asked.rounds + 1):
        first = await tokens_per_s(ours, number, asked)
        second = await tokens_per_s(other, number, asked)
        if number == 0:
            continue  # the first round of a server is slower
        ratios.append(first / second)
        print(f"{first:9.1f} tokens/s, {second:9.1f}: {ratios[-1]:.3f}", flush=True)
    print(f"median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure two servers in turns.")
    parser.add_argument("model")
    parser.add_argument("--ours", default="", help="options of the first server")
    parser.add_argument("--other", default="", help="options of the second one")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--port", type=int, default=31_980)
    asked = parser.parse_args()
    with (
        served(asked.model, asked.ours, asked.port) as ours,
        served(asked.model, asked.other, asked.port + 1) as other,
    ):
        asyncio.run(measure(ours, other, asked))


if __name__ == "__main__":
    main()

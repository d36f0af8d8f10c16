"""Two servers of one model with other options, asked in turns: how many times the tokens a second of the second the
first one has.

    python benchmarks/turns.py weft-nano --ours "--dp-size 2 --threads 1" --other "--threads 2"
    python benchmarks/turns.py FOLDER --ours "--tp-size 2 --threads 1" --other "--threads 2" --requests 1

Each round has prompts of its own, so nothing of them is in a cache. `python -m benchmarks.shape 0.6b` makes a FOLDER.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import statistics
import time

import httpx
from servers import served

HIGHEST_ID = 1_000  # of random prompts; every model has as many tokens


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
    asked = parser.parse_args()
    with (
        served("serve", asked.model, *shlex.split(asked.ours)) as ours,
        served("serve", asked.model, *shlex.split(asked.other)) as other,
    ):
        asyncio.run(measure(ours.url, other.url, asked))


if __name__ == "__main__":
    main()

"""What several models on one server cost each other, measured on a real server with nothing else to do:

    .venv/bin/python benchmarks/several.py loads MODEL OTHER [--times 30]     from a request for an unloaded OTHER to
                                           its first token, and the longest gap in a stream of MODEL meanwhile, in steps
    .venv/bin/python benchmarks/several.py both MODEL OTHER [--seconds 10]    tokens a second of each alone, of both
    ... [--concurrency 1] [-- more options of weft serve, behind the models]

Another server, for comparison, is measured in turns by the caller. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.e2e.server import Server

QUIET_S = 3.0  # of a stream, before and after a load


def body(model: str, max_tokens: int) -> dict[str, Any]:
    """Drawn at random: what was said before is guessed, and then a step gives several tokens."""
    return {
        "model": model,
        "prompt": f"{random.random()}: Once upon a time",
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
        "temperature": 1.0,
    }


async def tokens(
    client: httpx.AsyncClient, model: str, max_tokens: int, times: list[float]
) -> None:
    """Append the time of each token of a stream."""
    async with client.stream("POST", "/v1/completions", json=body(model, max_tokens)) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            times.append(time.monotonic())
    assert times, answer.status_code


async def stream_on(
    client: httpx.AsyncClient, model: str, max_tokens: int, streams: list[list[float]]
) -> None:
    """One stream behind the other, until the task is cancelled."""
    while True:
        streams.append([])
        await tokens(client, model, max_tokens, streams[-1])


class Beside(NamedTuple):
    """A load beside a stream, in seconds."""

    first_token: float
    longest_gap: float
    alone: float  # the longest gap in the seconds before
    step: float  # the usual gap in these


def gaps_between(streams: list[list[float]], from_s: float, to_s: float) -> list[float]:
    """The gaps within streams that touch the given time."""
    pairs = itertools.chain.from_iterable(map(itertools.pairwise, streams))
    return [b - a for a, b in pairs if b > from_s and a < to_s]


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(int(part * len(values)), len(values) - 1)]


async def one_load(client: httpx.AsyncClient, model: str, other: str, max_tokens: int) -> Beside:
    await client.post("/models/unload", json={"model": other})
    streams: list[list[float]] = []
    streaming = asyncio.ensure_future(stream_on(client, model, max_tokens, streams))
    while not streams or not streams[0]:
        await asyncio.sleep(0.05)
    await asyncio.sleep(QUIET_S)
    began_s = time.monotonic()
    first: list[float] = []
    await tokens(client, other, 1, first)
    end_s = time.monotonic()
    await asyncio.sleep(0.5)
    streaming.cancel()
    before = gaps_between(streams, began_s - QUIET_S / 2, began_s)
    return Beside(
        first_token=first[0] - began_s,
        longest_gap=max(gaps_between(streams, began_s, end_s)),
        alone=max(before),
        step=statistics.median(before),
    )


async def loads(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        alone: list[float] = []
        for _ in range(args.times):
            await client.post("/models/unload", json={"model": args.other})
            await asyncio.sleep(args.pause)
            began_s = time.monotonic()
            first: list[float] = []
            await tokens(client, args.other, 1, first)
            alone.append(first[0] - began_s)
        beside = [
            await one_load(client, args.model, args.other, args.max_tokens)
            for _ in range(args.beside)
        ]
    return {
        "first_token_s": {
            "p50": round(statistics.median(alone), 3),
            "p99": round(quantile(alone, 0.99), 3),
            "all": [round(one, 2) for one in alone],
        },
        "beside_a_stream": [
            {
                "first_token_s": round(one.first_token, 2),
                "longest_gap_ms": round(one.longest_gap * 1e3, 1),
                "longest_gap_alone_ms": round(one.alone * 1e3, 1),
                "step_ms": round(one.step * 1e3, 1),
                "steps": round(one.longest_gap / one.step, 1),
                "steps_alone": round(one.alone / one.step, 1),
            }
            for one in beside
        ],
    }


async def rate(
    client: httpx.AsyncClient,
    models: list[str],
    concurrency: int,
    seconds: float,
    max_tokens: int,
) -> dict[str, float]:
    """Tokens a second of each of these models, while all of them are busy."""
    times: dict[str, list[list[float]]] = {name: [] for name in models}
    streams = []
    for name in models:
        for _ in range(concurrency):
            work = stream_on(client, name, max_tokens, times[name])
            streams.append(asyncio.ensure_future(work))
    await asyncio.sleep(1.0)
    began_s = time.monotonic()
    await asyncio.sleep(seconds)
    end_s = time.monotonic()
    for one in streams:
        one.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return {
        name: round(sum(began_s < at < end_s for one in lists for at in one) / seconds, 1)
        for name, lists in times.items()
    }


async def both(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        for name in (args.model, args.other):
            await tokens(client, name, 1, [])
        found = {}
        for models in ([args.model], [args.other], [args.model, args.other]):
            found["+".join(models)] = await rate(
                client, models, args.concurrency, args.seconds, args.max_tokens
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("loads", "both"))
    parser.add_argument("model")
    parser.add_argument("other")
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--beside", type=int, default=5)
    parser.add_argument(
        "--pause", type=float, default=2.5, help="before a load: a process gets ready"
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--max-tokens", type=int, default=1_800, help="of a stream")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    small = ("--kv-tokens", "16384", "--max-running-requests", "16")
    server = Server(args.model, args.other, *args.options, small=small)
    try:
        args.model, args.other = (one["id"] for one in server.get("/models")["data"])
        work = {"loads": loads, "both": both}[args.what]
        print(json.dumps(asyncio.run(work(server, args)), indent=1))
    finally:
        server.stop()


if __name__ == "__main__":
    main()

"""What it costs requests that somebody looks at the live page: tokens a second with and without a viewer, in turns, and
how soon a viewer has the first picture.

    python benchmarks/page_open.py [--model weft-nano] [--rounds 6]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time

import httpx

NUM_REQUESTS = 8
NUM_TOKENS = 1_500


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


async def look(client: httpx.AsyncClient, first_ms: asyncio.Future[float]) -> None:
    """Read pictures until cancelled."""
    began_s = time.perf_counter()
    async with client.stream("GET", "/events") as answer:
        async for line in answer.aiter_lines():
            if line == "event: picture" and not first_ms.done():
                first_ms.set_result(1_000 * (time.perf_counter() - began_s))


async def measure(url: str, rounds: int) -> None:
    ratios: list[float] = []
    firsts: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await tokens_per_s(client)
        for _ in range(rounds):
            alone = await tokens_per_s(client)
            first_ms: asyncio.Future[float] = asyncio.get_running_loop().create_future()
            viewer = asyncio.create_task(look(client, first_ms))
            firsts.append(await first_ms)
            watched = await tokens_per_s(client)
            viewer.cancel()
            ratios.append(watched / alone)
            print(f"{alone:8.1f} tokens/s alone, {watched:8.1f} watched: {ratios[-1]:.3f}")
    print(f"ratio: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")
    print(f"first picture: median {statistics.median(firsts):.1f} ms, at most {max(firsts):.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="weft-nano")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--port", type=int, default=31_990)
    args = parser.parse_args()
    url = f"http://127.0.0.1:{args.port}"
    command = [sys.executable, "-m", "weft", "serve", args.model, "--port", str(args.port)]
    server = subprocess.Popen([*command, "--log-level", "error"])
    try:
        while True:
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        asyncio.run(measure(url, args.rounds))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()

"""What it costs that somebody looks at the live page: tokens a second and the seconds of CPU of engine and front for the
same requests with no viewer, one and ten, in turns, and how soon a viewer has the first picture.

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
import psutil

NUM_REQUESTS = 8
NUM_TOKENS = 800
VIEWERS = (0, 1, 10)


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


async def look(client: httpx.AsyncClient, firsts_ms: list[float]) -> None:
    """Read pictures until cancelled."""
    began_s = time.perf_counter()
    has_come = False
    async with client.stream("GET", "/events") as answer:
        async for piece in answer.aiter_raw():
            if not has_come and b"event: picture" in piece:
                has_come = True
                firsts_ms.append(1_000 * (time.perf_counter() - began_s))


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(url: str, rounds: int, processes: dict[str, psutil.Process]) -> None:
    rates: dict[int, list[float]] = {num: [] for num in VIEWERS}
    spent: dict[tuple[int, str], list[float]] = {}
    firsts_ms: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await tokens_per_s(client)
        for number in range(rounds):
            # In turns, forwards and backwards.
            for num in VIEWERS[:: 1 if number % 2 else -1]:
                seen = len(firsts_ms)
                viewers = [asyncio.create_task(look(client, firsts_ms)) for _ in range(num)]
                while len(firsts_ms) < seen + num:
                    await asyncio.sleep(0.02)
                before = {name: cpu_s(process) for name, process in processes.items()}
                rates[num].append(await tokens_per_s(client))
                for name, process in processes.items():
                    spent.setdefault((num, name), []).append(cpu_s(process) - before[name])
                for viewer in viewers:
                    viewer.cancel()
                await asyncio.gather(*viewers, return_exceptions=True)
    for num in VIEWERS:
        ratios = [one / alone for one, alone in zip(rates[num], rates[0], strict=True)]
        words = ", ".join(
            f"{name} {statistics.median(spent[num, name]):.2f} s of CPU" for name in processes
        )
        print(
            f"{num:2} viewers: {statistics.median(rates[num]):,.0f} tokens/s, {words}; tokens/s "
            f"compared with none: median {statistics.median(ratios):.3f}, "
            f"{min(ratios):.3f} to {max(ratios):.3f}"
        )
    print(
        f"first picture: median {statistics.median(firsts_ms):.1f} ms, at most {max(firsts_ms):.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="weft-nano")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--port", type=int, default=31_500)
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
        front = psutil.Process(server.pid)
        (engine,) = [one for one in front.children() if "worker" in " ".join(one.cmdline())]
        asyncio.run(measure(url, args.rounds, {"engine": engine, "front": front}))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()

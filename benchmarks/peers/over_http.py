"""Servers of OpenAI's API in turns, by the same client: tokens a second of one request, of a prompt, of sixteen requests.

    python benchmarks/peers/over_http.py --rounds 3 \
        weft="python -m weft serve model.gguf --speculative off --threads 2 --port {port}" \
        llama="llama-server -m model.gguf -t 2 -tb 2 -ngl 0 -c 16384 -np 16 -fa on --port {port}"

Prompts are random token ids, so that nothing is found again. In each round each server is started, warmed up, measured and
ended. Prints the best of three of each round, then the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

PROMPT, LONG_PROMPT, OUTPUT, REQUESTS, TRIES = 16, 512, 64, 16, 3
START_S = 120.0
IDS = range(1_000, 30_000)


class Speeds(NamedTuple):
    """Tokens a second."""

    one: float
    prompt: float
    sixteen: float


class Answer(NamedTuple):
    asked_s: float
    times: list[float]  # of the tokens

    @property
    def decode_speed(self) -> float:
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])

    @property
    def first_token_s(self) -> float:
        return self.times[0] - self.asked_s


class Client:
    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model

    async def ask(self, num_prompt: int, num_output: int) -> Answer:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": random.choices(IDS, k=num_prompt),
            "max_tokens": num_output,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        }
        asked_s = time.monotonic()
        times: list[float] = []
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise SystemExit((await answer.aread()).decode())
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                times.append(time.monotonic())
        return Answer(asked_s, times)

    async def sixteen(self) -> float:
        began_s = time.monotonic()
        found = await asyncio.gather(*(self.ask(PROMPT, OUTPUT) for _ in range(REQUESTS)))
        return REQUESTS * OUTPUT / (max(one.times[-1] for one in found) - began_s)


async def measure(url: str) -> Speeds:
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        models = (await http.get("/v1/models")).json()["data"]
        client = Client(http, models[0]["id"])
        await client.ask(PROMPT, PROMPT)
        one = [(await client.ask(PROMPT, OUTPUT)).decode_speed for _ in range(TRIES)]
        prompt = [(await client.ask(LONG_PROMPT, 2)).first_token_s for _ in range(TRIES)]
        sixteen = [await client.sixteen() for _ in range(TRIES)]
    return Speeds(max(one), LONG_PROMPT / min(prompt), max(sixteen))


@contextmanager
def serving(command: str) -> Iterator[str]:
    """The URL of a server, which is started with `command` and ended."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    process = subprocess.Popen(
        shlex.split(command.format(port=port)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"{process.args!r} does not become ready")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("servers", nargs="+", metavar="NAME=COMMAND")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[Speeds]] = {}
    for number in range(options.rounds):
        for server in options.servers:
            name, _, command = server.partition("=")
            with serving(command) as url:
                speeds = asyncio.run(measure(url))
            found.setdefault(name, []).append(speeds)
            print(f"round {number + 1}  {name:10}", *(f"{one:8.1f}" for one in speeds), flush=True)
    print(" " * 19, *(f"{name:>8}" for name in Speeds._fields))
    for name, rounds in found.items():
        medians = [statistics.median(values) for values in zip(*rounds, strict=True)]
        print(f"median   {name:10}", *(f"{one:8.1f}" for one in medians))


if __name__ == "__main__":
    main()

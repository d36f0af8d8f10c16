"""What several models on one server cost each other, measured on a real server with nothing else to do:

    .venv/bin/python benchmarks/several.py loads MODEL OTHER [--times 30]     from a request for an unloaded OTHER to
                                           its first token, and the longest gap in a stream of MODEL meanwhile, in steps
    .venv/bin/python benchmarks/several.py both MODEL OTHER [--seconds 10]    tokens a second of each alone, of both
    .venv/bin/python benchmarks/several.py front MODEL OTHER [--pairs 12] [--rounds 8] [--cases NAME ...]    processor time
                                           of the front for a request to MODEL, on a fresh server with MODEL alone and
                                           on one with both, in turns
    ... [--concurrency 1] [-- more options of weft serve, behind the models]

Another server, for comparison, is measured in turns by the caller. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.e2e.server import Server

QUIET_S = 3.0  # of a stream, before and after a load
WIDTH = 4  # requests at a time: with one, their cost depends on who sleeps when
SMALL = ("--kv-tokens", "16384", "--max-running-requests", "16")
PAGE = "It was late, and the rain had not stopped since the morning. " * 34  # 400 words


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


class FrontCase(NamedTuple):
    """A kind of request whose cost for the front is measured."""

    path: str
    fields: dict[str, Any]
    num: int = 200  # requests in a block
    is_apart: bool = False  # the body is sent behind the head, as most clients do


def front_cases(model: str) -> dict[str, FrontCase]:
    one = {"model": model, "max_tokens": 1, "temperature": 0}
    say = {"messages": [{"role": "user", "content": PAGE}]}
    long = one | {"prompt": "Hi", "max_tokens": 64, "ignore_eos": True}
    return {
        "one token": FrontCase("/v1/completions", one | {"prompt": "Hi"}),
        "one token, body apart": FrontCase("/v1/completions", one | {"prompt": "Hi"}, 200, True),
        "chat of 400 words": FrontCase("/v1/chat/completions", one | say, 100),
        "64 tokens": FrontCase("/v1/completions", long, 12),
        "stream of 64 tokens": FrontCase("/v1/completions", long | {"stream": True}, 12),
    }


class FrontMeter:
    """Sends requests to a server, and reads the processor time of its front."""

    def __init__(self, server: Server) -> None:
        self._threads = Path(f"/proc/{server.process.pid}/task")
        host, _, port = server.url.removeprefix("http://").partition(":")
        self._connections = [socket.create_connection((host, int(port))) for _ in range(WIDTH)]
        for connection in self._connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def cost_us(self, case: FrontCase) -> float:
        """Microseconds of processor time for each of a block of requests."""
        body = json.dumps(case.fields).encode()
        head = f"POST {case.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        pieces = [head.encode(), body] if case.is_apart else [head.encode() + body]
        end = b"0\r\n\r\n" if case.fields.get("stream") else b"}"
        began_us = self._used_us()
        for _ in range(case.num // WIDTH):
            for connection in self._connections:
                for piece in pieces:
                    connection.sendall(piece)
            for connection in self._connections:
                read_answer(connection, end)
        return (self._used_us() - began_us) / case.num

    def _used_us(self) -> float:
        """Processor time of all threads."""
        states = [(thread / "schedstat").read_text() for thread in self._threads.iterdir()]
        return sum(int(state.split()[0]) for state in states) / 1e3


def read_answer(connection: socket.socket, end: bytes) -> None:
    answer = b""
    while not answer.endswith(end):
        piece = connection.recv(1 << 16)
        answer += piece
        assert piece, "the server has closed the connection"
        assert answer.startswith(b"HTTP/1.1 200"), answer


class RealServer(Server):
    """Front and engine are started as by a user, not copied from a process that has imported weft."""

    def __init__(self, *options: str) -> None:
        super().__init__(*options, module=("weft.__main__",), small=SMALL)


def front(args: argparse.Namespace) -> dict[str, Any]:
    """Fresh servers for each pair: two with the same models differ by some percent for as long as
    they live."""
    found: dict[str, list[tuple[float, float]]] = {}
    for pair in range(args.pairs):
        servers: dict[int, RealServer] = {}  # number of models -> the server with them
        try:
            for number in (1, 2) if pair % 2 else (2, 1):
                models = (args.model, args.other)[:number]
                servers[number] = RealServer(*models, *args.options)
            meters = (FrontMeter(servers[1]), FrontMeter(servers[2]))
            cases = front_cases(servers[1].get("/v1/models")["data"][0]["id"])
            for name in args.cases or cases:
                costs = pair_of_costs(meters, cases[name], args.rounds)
                found.setdefault(name, []).append(costs)
        finally:
            for server in servers.values():
                server.stop()
    return {name: front_report(costs) for name, costs in found.items()}


def pair_of_costs(
    meters: tuple[FrontMeter, FrontMeter], case: FrontCase, rounds: int
) -> tuple[float, float]:
    """The least of the blocks on each server, in turns: other work only adds to them."""
    costs: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for at in (0, 1) if turn % 2 else (1, 0):
            cost_us = meters[at].cost_us(case)
            if turn:  # in the first one, all is new
                costs[at].append(cost_us)
    return min(costs[0]), min(costs[1])


def front_report(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    ratios = [several / one for one, several in pairs]
    spread = statistics.stdev(ratios) if len(ratios) > 1 else float("nan")
    return {
        "one_us": round(statistics.mean(one for one, _ in pairs)),
        "several_us": round(statistics.mean(several for _, several in pairs)),
        "more_percent": {
            "mean of pairs": round((statistics.mean(ratios) - 1) * 100, 2),
            "standard error": round(spread / len(ratios) ** 0.5 * 100, 2),
            "median of pairs": round((statistics.median(ratios) - 1) * 100, 2),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("loads", "both", "front"))
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
    parser.add_argument("--pairs", type=int, default=12, help="of servers, for front")
    parser.add_argument("--rounds", type=int, default=8, help="of front, for a pair")
    parser.add_argument("--cases", nargs="+", help="of front")
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    if args.what == "front":
        print(json.dumps(front(args), indent=1))
        return
    server = Server(args.model, args.other, *args.options, small=SMALL)
    try:
        args.model, args.other = (one["id"] for one in server.get("/models")["data"])
        work = {"loads": loads, "both": both}[args.what]
        print(json.dumps(asyncio.run(work(server, args)), indent=1))
    finally:
        server.stop()


if __name__ == "__main__":
    main()

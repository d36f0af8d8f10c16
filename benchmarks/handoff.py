"""What handing KV over costs and gives on this machine, as ratios within one run.

    python benchmarks/handoff.py                  pages over loopback, against a plain copy of as many bytes
    python benchmarks/handoff.py --model MODEL    time between tokens of a decode server, beside prompts

Pages: a pool of the layout of a 0.6B model in bfloat16 (56 pieces of 32 kB a page), from one side to the other, with
checksums (no secret) and with authentication (a secret), in turns with `sendall` and `recv_into` of the same bytes; all
between two processes.

With a model: streams on a decode server alone; the same while prompts go through `weft route` to a prefill server and
on to it; and streams and prompts on one server. Every server has one thread. The prompts want one token each. With `--pin`, the servers whose streams are measured have
core 0, and everything else core 1. With `--nice 10`, the prefill server gives way to all others, on the cores that they share.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection as PipeEnd

import numpy as np
from servers import Served, served

from weft.arrays import IntArray
from weft.bench.http import HttpClient, HttpError
from weft.handoff.decode import DecodeSide
from weft.handoff.facts import KvFacts
from weft.handoff.prefill import PrefillSide
from weft.memory.handoff.protocol import RoomAddress
from weft.memory.prefix_cache import CacheKey

SECRETS = {"checksums": "", "authenticated": "a secret of both sides"}
PAGE_SIZE = 16
PIECE_BYTES = 32_768
NUM_PIECES = 56
NUM_TOKENS = 1_024
ROUNDS = 9
HANG_S = 60.0
COPY_BYTES = 1 << 20
BUFFER_BYTES = 4 << 20  # of a socket, as handoff asks for
WARM_TOKENS = 16  # of a stream, before its gaps count


# ---- pages


class ShapedPool:
    """Memory of the layout of a KV pool of a 0.6B model."""

    page_bytes = PIECE_BYTES * NUM_PIECES

    def __init__(self, num_pages: int, fill: int) -> None:
        size = num_pages * PIECE_BYTES
        self._tensors = [np.full(size, fill, dtype=np.uint8) for _ in range(NUM_PIECES)]

    def pieces(self, page: int) -> list[memoryview]:
        start = page * PIECE_BYTES
        return [tensor.data[start : start + PIECE_BYTES] for tensor in self._tensors]


def facts() -> KvFacts:
    return KvFacts(lambda: dict)


def lend(commands: PipeEnd, num_pages: int) -> None:
    """The other process: lends rooms, and sends plain bytes, when it is told to."""
    sides: dict[str, PrefillSide] = {}
    ports: dict[str, int] = {}
    for name, secret in SECRETS.items():
        listener = socket.create_server(("127.0.0.1", 0))
        ports[name] = listener.getsockname()[1]
        sides[name] = PrefillSide(
            listener,
            ShapedPool(num_pages, 7),
            page_size=PAGE_SIZE,
            secret=secret,
            lease_s=HANG_S,
            facts=facts(),
            notify=lambda: None,
        )
        sides[name].start()
    source = memoryview(bytearray(b"\1") * (num_pages * ShapedPool.page_bytes))
    pages: IntArray = np.arange(num_pages, dtype=np.int32)
    commands.send(ports)
    while command := commands.recv():
        match command:
            case ("lend", name, room, key):
                sides[name].lend(room, key, pages)
            case ("copy", port):
                send_plain(port, source)
    for side in sides.values():
        side.close()


class Taker:
    """The side of this process that takes pages."""

    def __init__(self, name: str, port: int, commands: PipeEnd, num_pages: int) -> None:
        self._name = name
        self._port = port
        self._commands = commands
        self._pages: IntArray = np.arange(num_pages, dtype=np.int32)
        self._key = CacheKey("", np.arange(NUM_TOKENS, dtype=np.int32).tobytes())
        self._bell = threading.Condition()
        self._number = 0
        self._side = DecodeSide(
            ShapedPool(num_pages, 0),
            page_size=PAGE_SIZE,
            secret=SECRETS[name],
            facts=facts(),
            notify=self._ring,
        )
        self._side.start()

    def close(self) -> None:
        self._side.close()

    def hand_over(self) -> float:
        """Seconds for all pages."""
        self._number += 1
        number = self._number
        room = f"room {number}"
        self._commands.send(("lend", self._name, room, self._key))
        address = RoomAddress("127.0.0.1", self._port, room)
        self._side.ask(number, address, self._key, 0)
        self._wait_for("found")
        self._side.bind(number, number)
        began = time.perf_counter()
        self._side.fetch(number, self._key, 0, self._pages)
        self._wait_for("landed")
        took_s = time.perf_counter() - began
        self._side.leave(number)
        return took_s

    def _wait_for(self, kind: str) -> None:
        with self._bell:
            while True:
                found = self._side.take()
                assert not found.missed, found
                if getattr(found, kind):
                    return
                assert self._bell.wait(HANG_S)

    def _ring(self) -> None:
        with self._bell:
            self._bell.notify_all()


def measure_pages() -> None:
    """Two processes, as two servers are."""
    num_pages = NUM_TOKENS // PAGE_SIZE
    context = multiprocessing.get_context("spawn")
    commands, far_end = context.Pipe()
    other = context.Process(target=lend, args=(far_end, num_pages))
    other.start()
    ports = commands.recv()
    takers = {name: Taker(name, ports[name], commands, num_pages) for name in SECRETS}
    time.sleep(0.5)  # until both have their facts
    num_bytes = num_pages * ShapedPool.page_bytes
    times: dict[str, list[float]] = {name: [] for name in (*takers, "plain copy")}
    for _ in range(ROUNDS):
        for name, taker in takers.items():
            times[name].append(taker.hand_over())
        times["plain copy"].append(copy_over_loopback(commands, num_bytes))
    for name, found in times.items():
        took_s = statistics.median(found)
        ratios = [b / a for a, b in zip(found, times["plain copy"], strict=True)]
        print(
            f"{num_bytes / 1e6:,.0f} MB, {name}: {num_bytes / took_s / 1e9:.2f} GB/s, "
            f"{1e9 * took_s / num_bytes:.2f} ms per MB, {statistics.median(ratios):.2f} times a "
            f"plain copy ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    for taker in takers.values():
        taker.close()
    commands.send(None)
    other.join()


def copy_over_loopback(commands: PipeEnd, num_bytes: int) -> float:
    """Seconds for as many bytes from the other process to this one, from memory to memory."""
    sink = memoryview(bytearray(b"\1") * num_bytes)  # memory that is there: as that of a pool is
    with socket.create_server(("127.0.0.1", 0)) as listener:
        commands.send(("copy", listener.getsockname()[1]))
        far, _ = listener.accept()
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    rest = sink
    assert far.recv_into(rest[:1]) == 1  # it is ready
    began = time.perf_counter()
    far.send(b"!")
    rest = rest[1:]
    while rest:
        rest = rest[far.recv_into(rest) :]
    took_s = time.perf_counter() - began
    far.close()
    return took_s


def send_plain(port: int, source: memoryview) -> None:
    near = socket.create_connection(("127.0.0.1", port))
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    near.sendall(source[:1])
    near.recv(1)
    for start in range(1, len(source), COPY_BYTES):
        near.sendall(source[start : start + COPY_BYTES])
    near.close()


# ---- time between tokens


SMALL = ("--threads", "1", "--kv-tokens", "24576", "--max-running-requests", "16")


class Traffic:
    """Streams that are measured, and prompts beside them."""

    def __init__(
        self, num_streams: int, num_tokens: int, prompt_len: int, num_prompts: int
    ) -> None:
        self._num_streams = num_streams
        self._num_tokens = num_tokens
        self._prompt_len = prompt_len
        self._num_prompts = num_prompts
        self._rng = np.random.default_rng(0)
        self.num_computed = 0  # prompts

    async def gaps(self, url: str, prompts_to: str = "") -> list[float]:
        """Milliseconds between tokens of the streams at `url`, while prompts go elsewhere."""
        loads = [asyncio.create_task(self._prompts(prompts_to)) for _ in range(self._num_prompts)]
        if not prompts_to:
            for load in loads:
                load.cancel()
        await asyncio.sleep(0.3)
        streams = [self._stream(url) for _ in range(self._num_streams)]
        found = await asyncio.gather(*streams)
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        return [gap for one in found for gap in one]

    async def _stream(self, url: str) -> list[float]:
        times: list[float] = []
        body = self._body(16, self._num_tokens, stream=True)
        await HttpClient(url).stream(
            "/generate", body, lambda data: times.append(time.perf_counter())
        )
        times = times[WARM_TOKENS:]
        return [1e3 * (b - a) for a, b in itertools.pairwise(times)]

    async def _prompts(self, url: str) -> None:
        while True:
            body = self._body(self._prompt_len, 1, stream=True)
            try:
                await HttpClient(url).stream("/generate", body, lambda data: None)
            except HttpError as exc:
                print(exc, file=sys.stderr)
                return
            self.num_computed += 1

    def _body(self, num_tokens: int, max_new: int, *, stream: bool) -> bytes:
        ids = self._rng.integers(10, 4_000, num_tokens).tolist()
        sampling = {"temperature": 0.0, "max_new_tokens": max_new, "ignore_eos": True}
        return json.dumps(
            {"input_ids": ids, "sampling_params": sampling, "stream": stream}
        ).encode()


def measure_gaps(
    model: str, load_format: str, traffic: Traffic, rounds: int, *, pinned: bool, nice: int
) -> None:
    """`pinned`: the servers whose streams are measured have core 0, everything else core 1.
    `nice`: how far the prefill server gives way."""
    measured = "0" if pinned else ""
    others = "1" if pinned else ""
    if pinned:
        os.sched_setaffinity(0, {1})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    serve = ("serve", model, "--load-format", load_format, *SMALL)
    mode = "--disaggregation-mode"
    meeting = ("--disaggregation-bootstrap-port", port)
    with ExitStack() as started:

        def start(*words: str, cores: str, nice: int = 0) -> Served:
            return started.enter_context(served(*words, cores=cores, nice=nice))

        prefill = start(*serve, mode, "prefill", *meeting, cores=others, nice=nice)
        decode = start(*serve, mode, "decode", cores=measured)
        alone = start(*serve, cores=measured)
        front = start("route", "--prefill", prefill.url, port, "--decode", decode.url, cores=others)
        time.sleep(1.0)  # until the front has asked both
        cases: dict[str, Callable[[], list[float]]] = {
            "decode server alone": lambda: asyncio.run(traffic.gaps(decode.url)),
            "beside prompts on the prefill server": lambda: asyncio.run(
                traffic.gaps(decode.url, front.url)
            ),
            "one server with both": lambda: asyncio.run(traffic.gaps(alone.url, alone.url)),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
        for _ in range(rounds):
            for name, measure in cases.items():
                gaps = measure()
                found[name].append((float(np.median(gaps)), float(np.quantile(gaps, 0.99))))
        base = [p99 for _, p99 in found["decode server alone"]]
        for name, pairs in found.items():
            ratios = [p99 / one for (_, p99), one in zip(pairs, base, strict=True)]
            print(
                f"{name}: p50 {statistics.median(p50 for p50, _ in pairs):.2f} ms, "
                f"p99 {statistics.median(p99 for _, p99 in pairs):.2f} ms, "
                f"{statistics.median(ratios):.2f} times the decode server alone"
            )
        print(f"{traffic.num_computed} prompts meanwhile")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="", help="folder or name of a model")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=300, help="of each stream")
    parser.add_argument("--prompt-len", type=int, default=1_500)
    parser.add_argument("--prompts", type=int, default=1, help="that are computed at a time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--pin",
        action="store_true",
        help="the decode server has a core of its own, all others share another one",
    )
    parser.add_argument("--nice", type=int, default=0, help="of the prefill server")
    args = parser.parse_args()
    if not args.model:
        measure_pages()
        return 0
    traffic = Traffic(args.streams, args.tokens, args.prompt_len, args.prompts)
    measure_gaps(
        args.model,
        args.load_format,
        traffic,
        args.rounds,
        pinned=args.pin,
        nice=args.nice,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

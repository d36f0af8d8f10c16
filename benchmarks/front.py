"""What the front costs for each request and for each streamed token, in microseconds of CPU time of its process:

    .venv/bin/python benchmarks/front.py [--streams 32] [--tokens 400] [--step-ms 8] [--path /v1/messages]
                                         [--prompt-len 544] [--interval 1] [--rounds 3] [--profile tokens|requests]

Three processes: the front as `weft serve` builds it, an engine that computes nothing and sends a token of each stream
every `--step-ms`, and clients that read bytes and look at nothing but the end; when all streams have ended, they come
again. What is counted hardly depends on what else the machine does: CPU time of tokens between two steps near the
beginning and the end of a round, that of requests from there to the first such step of the next round, less what
its steps take. `--prompt-len` gives text completions a prompt of token ids. `--profile` tells where one of the two goes
(the sum is then larger).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import random
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import zmq

from weft.client.client import EngineClient
from weft.config.server import ServerConfig
from weft.messages.channel import AsyncReceiver, Receiver, Sender
from weft.messages.codec import FromEngine, decode_from_engine, decode_to_engine
from weft.messages.replies import Finish, StepOutput
from weft.messages.requests import GenerateRequest
from weft.messages.status import EngineReady
from weft.observe import garbage
from weft.server.app import create_app
from weft.server.context import Readiness, ServerInfo
from weft.server.serve import make_server
from weft.server.serve import run as run_loop
from weft.text.tokenizer import Tokenizer

MODEL = Path(__file__).parents[1] / "weft" / "bundled" / "weft-nano"
FIRST_ID, LAST_ID = 100, 1_000  # tokens that are text
SKIPPED = 20  # steps at both ends of a round that do not count for tokens
PAUSE_S = 0.2  # between two rounds
CONTEXT = 100_000
BODIES = {
    "/v1/completions": {"prompt": "Once"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}]},
    "/generate": {"text": "Once"},
}


def engine(folder: str, streams: int, tokens: int, rounds: int, step_ms: float) -> None:
    """Answers so many requests together, so often, then ends."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    receiver = Receiver(context, f"ipc://{folder}/in", decode_to_engine)
    sender = Sender(context, f"ipc://{folder}/out")
    sender.send(
        EngineReady(
            model_summary="none",
            vocab_size=1 << 20,
            context_length=CONTEXT,
            max_prompt_tokens=CONTEXT,
            kv_tokens=CONTEXT,
            page_size=1,
            startup=[],
        )
    )
    rng = random.Random(0)
    for _ in range(rounds):
        open_ids: list[int] = []
        while len(open_ids) < streams:
            receiver.wait(1.0)
            open_ids += [
                message.id for message in receiver.drain() if isinstance(message, GenerateRequest)
            ]
        ids = np.asarray(open_ids, dtype=np.int64).tobytes()
        ends = [
            Finish(id=id, reason="length", prompt_tokens=4, completion_tokens=tokens)
            for id in open_ids
        ]
        due = time.perf_counter()
        for step in range(tokens):
            sampled = np.asarray(
                [rng.randrange(FIRST_ID, LAST_ID) for _ in open_ids], dtype=np.int32
            ).tobytes()
            sender.send(
                StepOutput(ids=ids, tokens=sampled, finished=ends if step == tokens - 1 else [])
            )
            due += step_ms / 1000
            time.sleep(max(due - time.perf_counter(), 0.0))
    sender.close(linger_s=5.0)


def clients(
    port: int, path: str, streams: int, tokens: int, rounds: int, prompt_len: int, interval: int
) -> None:
    """Sends so many requests, and reads until all have ended, so often. Prints how many events came."""
    fields = BODIES[path] | (
        {"prompt": list(range(FIRST_ID, FIRST_ID + prompt_len))} if prompt_len else {}
    )
    body = json.dumps(
        fields | {"max_tokens": tokens, "stream": True, "stream_interval": interval}
    ).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(rounds):
        read_streams(port, head.encode() + body, streams)
        time.sleep(PAUSE_S)


def read_streams(port: int, request: bytes, streams: int) -> None:
    selector = selectors.DefaultSelector()
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request)
        selector.register(connection, selectors.EVENT_READ)
    left, events, size = streams, 0, 0
    while left:
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            if data.startswith(b"HTTP/1.1 4"):
                sys.exit(f"the front refuses: {data.decode()}")
            events += data.count(b"data: ")
            size += len(data)
            if not data or data.endswith(b"0\r\n\r\n"):
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                left -= 1
    print(f"{events:,} events, {size:,} bytes")


class Meter:
    """CPU time between steps of the engine."""

    def __init__(
        self,
        receiver: AsyncReceiver[FromEngine],
        tokens: int,
        profiled: str,
        profile: cProfile.Profile,
    ):
        self.tokens_s: list[float] = []  # of each round's steps but those at its ends
        self.rest_s: list[float] = []  # from there to the same in the next round
        self._receiver = receiver
        self._tokens = tokens  # of a stream
        self._profiled = profiled
        self._profile = profile
        self._num_steps = 0
        self._began_s = 0.0

    async def receive(self) -> FromEngine:
        message = await self._receiver.receive()
        if isinstance(message, StepOutput):
            self._num_steps += 1
            step = self._num_steps % self._tokens
            if step == SKIPPED:
                self._turn(self.rest_s, "tokens")
            elif step == self._tokens - SKIPPED:
                self._turn(self.tokens_s, "requests")
        return message

    def _turn(self, ended: list[float], begins: str) -> None:
        self._profile.disable()
        now = time.process_time()
        ended.append(now - self._began_s)
        self._began_s = now
        if begins == self._profiled:
            self._profile.enable()


async def front(args: argparse.Namespace, folder: str, profile: cProfile.Profile) -> Meter:
    """All rounds, from the start of the front to its end."""
    receiver = AsyncReceiver(zmq.Context(), f"ipc://{folder}/out", decode_from_engine, bind=True)
    sender = Sender(zmq.Context(), f"ipc://{folder}/in", bind=True)
    tokenizer = Tokenizer.load(MODEL)
    client = EngineClient(tokenizer, sender.send)
    readiness = Readiness()
    config = ServerConfig()
    info = ServerInfo(
        model_name="none", context_length=CONTEXT, version="0", started_at=time.time()
    )
    server = make_server(create_app(client, tokenizer, config, info, readiness), config)
    listener = socket.create_server(("127.0.0.1", 0), backlog=2_048)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    meter = Meter(receiver, args.tokens, args.profile, profile)
    receiving = asyncio.create_task(client.run(meter.receive))
    numbers = {"--streams": args.streams, "--tokens": args.tokens, "--rounds": args.rounds}
    me = [sys.executable, __file__, *(str(word) for pair in numbers.items() for word in pair)]
    worker = subprocess.Popen([*me, "--step-ms", str(args.step_ms), "--as-engine", folder])
    await client.state.wait_ready()
    readiness.mark_ready()
    garbage.freeze()
    port = str(listener.getsockname()[1])
    asked = (
        "--path",
        args.path,
        "--prompt-len",
        str(args.prompt_len),
        "--interval",
        str(args.interval),
    )
    readers = await asyncio.create_subprocess_exec(*me, *asked, "--as-clients", port)
    await readers.wait()
    worker.wait()
    server.should_exit = True
    await serving
    receiving.cancel()
    profile.disable()
    return meter


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of the front for each streamed token")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=8.0)
    parser.add_argument("--path", choices=list(BODIES), default="/v1/completions")
    parser.add_argument(
        "--prompt-len", type=int, default=0, help="token ids in place of the prompt"
    )
    parser.add_argument("--interval", type=int, default=1, help="tokens in an event")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", choices=["tokens", "requests"], default="")
    parser.add_argument("--as-engine", help=argparse.SUPPRESS)
    parser.add_argument("--as-clients", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_engine:
        engine(args.as_engine, args.streams, args.tokens, args.rounds, args.step_ms)
        return
    if args.as_clients:
        clients(
            args.as_clients,
            args.path,
            args.streams,
            args.tokens,
            args.rounds,
            args.prompt_len,
            args.interval,
        )
        return
    profile = cProfile.Profile()
    with tempfile.TemporaryDirectory() as folder:
        meter = run_loop(front(args, folder, profile))
    token_s = statistics.median(meter.tokens_s) / (args.tokens - 2 * SKIPPED) / args.streams
    request_s = (
        statistics.median(meter.rest_s[1:]) / args.streams - 2 * SKIPPED * token_s
    )  # the first holds the start
    print(
        f"{args.path}, {args.streams} streams: {token_s * args.streams * 1e6:,.0f} us of CPU a step, "
        f"{token_s * 1e6:.1f} us a token, {request_s * 1e6:,.0f} us a request"
    )
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()

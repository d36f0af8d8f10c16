"""What the front costs for each streamed token, in microseconds of CPU time of its process:

    .venv/bin/python benchmarks/front.py [--streams 32] [--tokens 400] [--step-ms 8] [--path /v1/messages] [--profile]

Three processes: the front as `weft serve` builds it, an engine that computes nothing and sends a token of each stream
every `--step-ms`, and clients that read bytes and look at nothing but the end. CPU time is counted between two steps
near the beginning and the end, so that neither start nor requests are in it; it hardly depends on what else the machine
does. `--profile` tells where it goes (the sum is then larger).
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
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import zmq

from weft.config.server import ServerConfig
from weft.messages.channel import AsyncReceiver, Receiver, Sender
from weft.messages.codec import FromEngine, decode_from_engine, decode_to_engine
from weft.messages.control import EngineReady
from weft.messages.replies import Finish, StepOutput
from weft.messages.requests import GenerateRequest
from weft.observe import garbage
from weft.server.app import create_app
from weft.server.info import Readiness, ServerInfo
from weft.server.serve import make_server
from weft.server.serve import run as run_loop
from weft.text.client import EngineClient
from weft.text.tokenizer import Tokenizer

MODEL = Path(__file__).parents[1] / "weft" / "bundled" / "weft-nano"
FIRST_ID, LAST_ID = 100, 1_000  # tokens that are text
SKIPPED = 20  # steps at both ends that are not counted
CONTEXT = 100_000
BODIES = {
    "/v1/completions": {"prompt": "Once"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}]},
    "/generate": {"text": "Once"},
}


def engine(folder: str, streams: int, tokens: int, step_ms: float) -> None:
    """Answers so many requests together, then ends."""
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
    open_ids: list[int] = []
    while len(open_ids) < streams:
        receiver.wait(1.0)
        open_ids += [message.id for message in receiver.drain() if isinstance(message, GenerateRequest)]
    ids = np.asarray(open_ids, dtype=np.int64).tobytes()
    rng = random.Random(0)
    due = time.perf_counter()
    for step in range(tokens):
        sampled = [rng.randrange(FIRST_ID, LAST_ID) for _ in open_ids]
        is_last = step == tokens - 1
        ends = [Finish(id=id, reason="length", prompt_tokens=4, completion_tokens=tokens) for id in open_ids]
        sender.send(
            StepOutput(ids=ids, tokens=np.asarray(sampled, dtype=np.int32).tobytes(), finished=ends if is_last else [])
        )
        due += step_ms / 1000
        time.sleep(max(due - time.perf_counter(), 0.0))
    sender.close(linger_s=5.0)


def clients(port: int, path: str, streams: int, tokens: int) -> None:
    """Sends so many requests, and reads until all have ended. Prints how many events came."""
    body = json.dumps(BODIES[path] | {"max_tokens": tokens, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    selector = selectors.DefaultSelector()
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + body)
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
                left -= 1
    print(f"{events:,} events, {size:,} bytes")


class Meter:
    """CPU time between two steps of the engine."""

    def __init__(self, receiver: AsyncReceiver[FromEngine], first: int, last: int, profile: cProfile.Profile | None):
        self.cpu_s = 0.0
        self._receiver = receiver
        self._first = first
        self._last = last
        self._profile = profile
        self._num_steps = 0

    async def receive(self) -> FromEngine:
        message = await self._receiver.receive()
        if isinstance(message, StepOutput):
            self._num_steps += 1
            if self._num_steps == self._first:
                self.cpu_s = -time.process_time()
                if self._profile is not None:
                    self._profile.enable()
            elif self._num_steps == self._last:
                if self._profile is not None:
                    self._profile.disable()
                self.cpu_s += time.process_time()
        return message


async def front(args: argparse.Namespace, folder: str, profile: cProfile.Profile | None) -> float:
    """Returns the CPU seconds of the steps that count."""
    receiver = AsyncReceiver(zmq.Context(), f"ipc://{folder}/out", decode_from_engine, bind=True)
    sender = Sender(zmq.Context(), f"ipc://{folder}/in", bind=True)
    tokenizer = Tokenizer.load(MODEL)
    client = EngineClient(tokenizer, sender.send)
    readiness = Readiness()
    config = ServerConfig()
    info = ServerInfo(model_name="none", context_length=CONTEXT, version="0", started_at=time.time())
    server = make_server(create_app(client, tokenizer, config, info, readiness), config)
    listener = socket.create_server(("127.0.0.1", 0), backlog=2_048)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    meter = Meter(receiver, SKIPPED, args.tokens - SKIPPED, profile)
    receiving = asyncio.create_task(client.run(meter.receive))
    me = [sys.executable, __file__, "--streams", str(args.streams), "--tokens", str(args.tokens)]
    worker = subprocess.Popen([*me, "--step-ms", str(args.step_ms), "--as-engine", folder])
    await client.wait_ready()
    readiness.mark_ready()
    garbage.freeze()
    port = str(listener.getsockname()[1])
    readers = await asyncio.create_subprocess_exec(*me, "--path", args.path, "--as-clients", port)
    await readers.wait()
    worker.wait()
    server.should_exit = True
    await serving
    receiving.cancel()
    return meter.cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of the front for each streamed token")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=8.0)
    parser.add_argument("--path", choices=list(BODIES), default="/v1/completions")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--as-engine", help=argparse.SUPPRESS)
    parser.add_argument("--as-clients", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_engine:
        engine(args.as_engine, args.streams, args.tokens, args.step_ms)
        return
    if args.as_clients:
        clients(args.as_clients, args.path, args.streams, args.tokens)
        return
    profile = cProfile.Profile() if args.profile else None
    with tempfile.TemporaryDirectory() as folder:
        cpu_s = run_loop(front(args, folder, profile))
    num_steps = args.tokens - 2 * SKIPPED
    print(
        f"{args.path}, {args.streams} streams: {cpu_s / num_steps * 1e6:,.0f} us of CPU a step, "
        f"{cpu_s / num_steps / args.streams * 1e6:.1f} us a token"
    )
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()

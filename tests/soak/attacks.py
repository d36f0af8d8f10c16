"""What clients do who mean harm: numbers out of range, bodies and heads without end, pages of
another origin, legal requests that cost much. Each must be refused or answered, and nobody else may
notice."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from tests.soak import traffic
from tests.soak.http import Exchange, Lost, call
from tests.soak.ledger import Wrong
from tests.soak.world import World

EXTREME: tuple[Any, ...] = (-(2**63) - 1, -(2**63), 2**63, 2**64, 10**400, "NaN", "1", [], {})
FIELDS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("/generate", "priority", {"text": "a"}),
    ("/generate", "sampling_params.max_new_tokens", {"text": "a"}),
    ("/generate", "sampling_params.top_k", {"text": "a"}),
    ("/generate", "sampling_params.seed", {"text": "a", "sampling_params": {"max_new_tokens": 1}}),
    ("/generate", "sampling_params.n", {"text": "a"}),
    ("/generate", "sampling_params.temperature", {"text": "a"}),
    ("/generate", "input_ids", {}),
    ("/v1/completions", "prompt", {"max_tokens": 1}),
    ("/v1/completions", "max_tokens", {"prompt": "a"}),
    ("/v1/completions", "priority", {"prompt": "a"}),
    ("/v1/completions", "n", {"prompt": "a"}),
    ("/v1/completions", "logprobs", {"prompt": "a"}),
    ("/v1/chat/completions", "top_p", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/chat/completions", "timeout_ms", {"messages": [{"role": "user", "content": "a"}]}),
    ("/detokenize", "tokens", {}),
    ("/open_session", "capacity", {}),
    ("/slow_down", "forward_sleep_time", {}),
    ("/start_profile", "num_steps", {}),
)
MANY = 20_000  # of whatever there is a legal mass of
FLOOD_BYTES = 2_000_000  # that a client tries to send where nothing is expected


async def extreme_number(world: World, rng: random.Random) -> None:
    """One field of one route with a value that no such field may have."""
    path, name, body = rng.choice(FIELDS)
    value = rng.choice(EXTREME)
    if name in ("input_ids", "tokens", "prompt") and isinstance(value, int):
        value = [value]
    sent: dict[str, Any] = json.loads(json.dumps(body))
    outer, _, inner = name.rpartition(".")
    (sent.setdefault(outer, {}) if outer else sent)[inner] = value
    await world.ledger.account(
        "extreme number", lambda: _answered(world, path, sent, {"200", "400", "404", "409"})
    )


async def costly(world: World, rng: random.Random) -> None:
    """A legal request, or nearly, that costs the server more than the client."""
    kind = rng.randrange(6)
    path = "/v1/completions"
    body = dict[str, Any](prompt="a", max_tokens=1)
    if kind == 0:
        path = "/detokenize"
        body = {"tokens": [rng.randrange(4_000)] * MANY}
    elif kind == 1:
        body |= {f"unknown_{i}": i for i in range(MANY)}
    elif kind == 2:
        path = "/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "x"}] * 2_000, "max_tokens": 1}
    elif kind == 3:
        body |= {"prompt": ["word " * 200] * 1_025}
    elif kind == 4:
        body |= {"regex": "(a?){500}" + "a{500}" * rng.randint(1, 3)}
    else:
        top = {"return_logprob": True, "top_logprobs_num": 20, "stream": True}
        path = "/generate"
        body = {"text": "a", "sampling_params": {"max_new_tokens": world.tokens(200)}} | top
    body["rid"] = world.name()
    await world.ledger.account(
        "costly", lambda: _answered(world, path, body, {"200", "400", "422", "503"})
    )


async def _answered(world: World, path: str, body: dict[str, Any], may: set[str]) -> str:
    """The answer is one of `may`, and an error has the documented form."""
    async with Exchange(world.port, "POST", path, body) as exchange:
        status = await exchange.head()
        answer = await exchange.whole()
    if str(status) not in may | world.may:
        raise Wrong(f"{path} {json.dumps(body)[:200]} is answered with {status} {answer[:200]!r}")
    if status != 200 and "message" not in json.loads(answer)["error"]:
        raise Wrong(f"{path}: an error without a message: {answer[:200]!r}")
    return "complete" if status == 200 else f"error {status}"


async def page_of_another_origin(world: World, rng: random.Random) -> None:
    """What a browser sends for a page that is not ours."""
    foreign = rng.choice(
        ("Origin: http://evil.example", "Sec-Fetch-Site: cross-site", "Host: evil.example")
    )
    method, path = rng.choice(
        (("GET", "/server_info"), ("POST", "/v1/completions"), ("GET", "/metrics"))
    )
    body = b'{"prompt": "a", "max_tokens": 1}' if method == "POST" else b""
    host = "" if foreign.startswith("Host") else "Host: 127.0.0.1\r\n"
    head = f"{method} {path} HTTP/1.1\r\n{host}{foreign}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"

    async def send() -> str:
        status = _status(await _raw(world.port, [head.encode() + body], 30.0))
        if status not in ("403", "421") and status not in world.may:
            raise Wrong(f"{foreign} is answered with {status} at {path}")
        return f"error {status}"

    await world.ledger.account("another origin", send)


async def flood(world: World, rng: random.Random) -> None:
    """Bytes without end where none belong: behind the last chunk, in an extension of a chunk,
    behind an answer."""
    begin = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
    begin += b"Content-Type: application/json\r\n\r\n"
    piece = b"X-%d: " % rng.randrange(10**6) + b"a" * 8_000 + b"\r\n"
    kind = rng.randrange(3)
    if kind == 0:
        pieces = [begin + b"2\r\n{}\r\n0\r\n", *[piece] * (FLOOD_BYTES // len(piece))]
    elif kind == 1:
        pieces = [begin + b"2;", *[b"e=" + b"a" * 8_000 + b";"] * (FLOOD_BYTES // 8_003)]
    else:
        pieces = [
            b"GET /nothing HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
            *[b"\r\n" * 4_000] * (FLOOD_BYTES // 8_000),
        ]

    async def send() -> str:
        await _raw(world.port, pieces, 30.0)
        return "ended"

    await world.ledger.account("flood", send)


async def drip(world: World, rng: random.Random) -> None:
    """A body that comes a byte at a time though the request has been answered."""
    path = rng.choice(("/nothing", "/health", "/v1/completions"))
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n"

    async def send() -> str:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", world.port)
        except OSError as exc:
            raise Lost("while connecting") from exc
        try:
            writer.write(head.encode())
            for _ in range(rng.randint(5, 40)):
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.1)
        except OSError:
            return "ended"
        finally:
            writer.close()
        return "left"

    await world.ledger.account("drip", send)


async def half_close(world: World, rng: random.Random) -> None:
    """A client that has nothing more to say still wants its answer."""
    body = json.dumps(
        {"prompt": traffic.text(rng, 5), "max_tokens": 3, "rid": world.name()}
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body)

    async def send() -> str:
        status = _status(await _raw(world.port, [head + body], 120.0, half_close=True))
        if status != "200" and status not in world.may:
            raise Wrong(f"a client that half-closed is answered with {status}")
        return "complete" if status == "200" else f"error {status}"

    await world.ledger.account("half close", send)


async def number_in_a_query(world: World, rng: random.Random) -> None:
    """Numbers in the path and the query."""
    path = rng.choice(("/requests?limit=", "/v1/loads?dp_rank=", "/flush_cache?timeout="))
    value = rng.choice((str(2**63), "0" * 300 + "1" + "9" * 20, "-1", "NaN", "1e308", "%00"))

    async def send() -> str:
        status, answer = await call(world.port, "GET", path + value)
        if status >= 500 and str(status) not in world.may:
            raise Wrong(f"{path}{value[:40]} is answered with {status} {answer[:200]!r}")
        return "done" if status == 200 else f"error {status}"

    await world.ledger.account("number in a query", send)


async def _raw(
    port: int, pieces: list[bytes], seconds: float, *, half_close: bool = False
) -> bytes:
    """Send so many pieces as are taken, then read what comes until the end or `seconds` are
    over."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError as exc:
        raise Lost("while connecting") from exc
    found = b""
    try:
        async with asyncio.timeout(seconds):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if half_close:
                writer.write_eof()
            while (piece := await reader.read(1 << 16)) and len(found) < 1 << 20:
                found += piece
    except (OSError, TimeoutError):
        pass  # closed on us, or nothing said: what came before is what counts
    finally:
        writer.close()
    return found


def _status(answer: bytes) -> str:
    """The status of a raw answer. Interim ones are passed over, as every client does."""
    while answer.startswith(b"HTTP/1.1 100 "):
        answer = answer.partition(b"\r\n\r\n")[2]
    if not answer.startswith(b"HTTP/1.1 "):
        raise Lost("no answer")
    return answer[9:12].decode()

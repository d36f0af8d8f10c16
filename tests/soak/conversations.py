"""Answers that are sent back as the next turn, whole or cut, over all APIs; schemas that clients
write; and a lender that a client names where there is none."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.server.turns import CLIENTS, Client
from tests.soak import traffic
from tests.soak.http import Exchange, call
from tests.soak.ledger import Wrong
from tests.soak.world import World

CHAT = "/v1/chat/completions"
FORCED = {"chat": "required", "items": "required", "by id": "required", "messages": {"type": "any"}}
LITERALS = (2**53 + 1, 1180334356853624923, -(2**63), 2**63 - 1, 2**64 + 1)
BOUNDS = ((-(2**63), 2**63 - 1), (2**53, 2**53 + 4), (-(2**53) - 3, -(2**53)))
PATTERNS = (r"^(?=.*\d)[a-z0-9]{4}$", r"\bab\b", r"^(?!x)[a-c]{3}$")
HALVES = (r"a\ud83d", r"\ude00\ud83d", r"\ud83d\ude00 \ud83dx")


async def round_trip(world: World, rng: random.Random) -> None:
    """Two turns after the first, each with the answer before as the client got it: with calls that
    are forced, or not, and that are cut somewhere."""
    client = rng.choice(CLIENTS)
    body = {**client.first(), "model": "weft-nano"}
    if client.name in FORCED and rng.random() < 0.5:
        body["tool_choice"] = FORCED[client.name]
    for _ in range(rng.randint(2, 3)):
        stream = rng.random() < 0.5
        most = rng.randint(1, 40)
        answers: list[Any] = []
        sent = body

        async def send(sent: dict[str, Any] = sent, stream: bool = stream, most: int = most) -> str:
            text = await _turn(world, client, sent, stream=stream, most=most)
            if text.startswith("error"):
                return text
            answers.append(client.read(text, stream))  # noqa: B023
            return "complete"

        end = await world.ledger.account(f"round trip of {client.name}", send)
        if end != "complete":
            return
        body = client.follow(body, answers[0])


async def _turn(
    world: World, client: Client, body: dict[str, Any], *, stream: bool, most: int
) -> str:
    """The text of the answer; or "error", with the status that may be."""
    limit: dict[str, Any] = {"max_tokens": most}
    if client.path == "/v1/responses":
        limit = {"max_output_tokens": most}
    elif client.path == "/api/chat":
        limit = {"options": {"num_predict": most}}
    sent = body | limit | {"stream": stream}
    status, answer = await call(world.port, "POST", client.path, sent)
    if status == 200:
        return answer.decode()
    if str(status) not in world.may:
        raise Wrong(
            f"{client.name}: the answer sent back is answered with {status} {answer[:300]!r}"
        )
    return f"error {status}"


async def half_pairs(world: World, rng: random.Random) -> None:
    """Half of a surrogate pair, in a text and in the arguments of a call."""
    half = rng.choice(HALVES)
    arguments = json.dumps(f'{{"city": "{half}"}}')
    call_ = (
        f'{{"id": "c", "type": "function", "function": {{"name": "f", "arguments": {arguments}}}}}'
    )
    messages = f'[{{"role": "user", "content": "{half}"}}'
    if rng.random() < 0.5:
        messages += f', {{"role": "assistant", "content": null, "tool_calls": [{call_}]}}'
        messages += f', {{"role": "tool", "tool_call_id": "c", "content": "{half}"}}'
    body = f'{{"messages": {messages}], "max_tokens": 3, "rid": "{world.name()}"}}'.encode()

    async def send() -> str:
        status, answer = await call(world.port, "POST", CHAT, body)
        return _may(world, status, answer, {200})

    await world.ledger.account("half pairs", send)


async def schema(world: World, rng: random.Random) -> None:
    """Numbers that no float holds come out as they were written, or are named; so are patterns that
    cannot be enforced."""
    kind = rng.randrange(4)
    value: dict[str, Any]
    if kind in (0, 3):
        value = {"enum": [rng.choice(LITERALS)]}
    elif kind == 1:
        low, high = rng.choice(BOUNDS)
        value = {"type": "integer", "minimum": low, "maximum": high}
    else:
        value = {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 6}
    is_alone = kind == 3  # without an object around it
    whole = value
    if not is_alone:
        whole = {"type": "object", "properties": {"v": value}, "required": ["v"]}
    body = {
        "messages": [{"role": "user", "content": traffic.text(rng, 5)}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": whole}},
        "max_tokens": 60,
        "temperature": rng.choice((0, 1)),
        "rid": world.name(),
    }

    async def send() -> str:
        async with Exchange(world.port, "POST", CHAT, body) as exchange:
            status = await exchange.head()
            answer = await exchange.whole()
            warnings = exchange.header("x-weft-warnings")
        end = _may(world, status, answer, {200})
        if status != 200:
            return end
        if "pattern" in value and "pattern" not in warnings:
            raise Wrong(f"the warnings do not name the pattern {value['pattern']}: {warnings!r}")
        [choice] = json.loads(answer)["choices"]
        is_enforced = "enum" not in warnings
        if choice["finish_reason"] == "stop" and is_enforced:
            said = json.loads(choice["message"]["content"])
            _check(value, said if is_alone else said["v"])
        return end

    await world.ledger.account("schema", send)


def _check(value: dict[str, Any], said: Any) -> None:
    if "enum" in value and said not in value["enum"]:
        raise Wrong(f"{said} is none of {value['enum']}")
    if "minimum" in value and not value["minimum"] <= said <= value["maximum"]:
        raise Wrong(f"{said} is not from {value['minimum']} to {value['maximum']}")


async def lender(world: World, rng: random.Random) -> None:
    """A prefill server of the client's own, named to a server that takes KV from nobody."""
    fields: dict[str, Any] = {
        "bootstrap_host": rng.choice(("127.0.0.1", "evil.example", "a..b")),
        "bootstrap_port": rng.randrange(1, 65_536),
        "bootstrap_room": rng.getrandbits(40),
    }
    if rng.random() < 0.5:
        remote = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 9}
        fields = {"kv_transfer_params": remote}
    body = {"prompt": traffic.text(rng, 5), "max_tokens": 2, "rid": world.name()} | fields

    async def send() -> str:
        status, answer = await call(world.port, "POST", "/v1/completions", body)
        return _may(world, status, answer, {400})

    await world.ledger.account("lender", send)


def _may(world: World, status: int, answer: bytes, expected: set[int]) -> str:
    if status not in expected and str(status) not in world.may:
        raise Wrong(f"answered with {status} {answer[:300]!r}, not {sorted(expected)}")
    return "complete" if status == 200 else f"error {status}"

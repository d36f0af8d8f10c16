"""Requests for tokens: made at random, sent in every form, and their answers looked at."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Collection
from typing import Any

from tests.soak.answers import Answer, reasons_of, texts_of
from tests.soak.http import Exchange, Lost
from tests.soak.ledger import Wrong
from tests.soak.world import World

WORDS = (
    *("import", "os", "def", "read", "line", "path", "return", "for", "in", "open"),
    *("file", "the", "a", "of", "value", "list", "while", "True", "print", "self"),
)
PATHS = ("/v1/completions", "/v1/chat/completions", "/generate")
ENDS = ("stop", "length")


def text(rng: random.Random, most: int = 60) -> str:
    """Some words, often with a beginning that others have, too."""
    beginning = " ".join(WORDS[: rng.choice((0, 0, 8, 16))] * rng.randint(1, 4))
    return f"{beginning} {' '.join(rng.choices(WORDS, k=rng.randint(1, most)))}"


def sampling(rng: random.Random, most: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "temperature": rng.choice((0, 0, 0.7, 1.3)),
        "seed": rng.getrandbits(31),
    }
    fields["max_tokens"] = rng.randint(1, most)
    if rng.random() < 0.3:
        fields["n"] = rng.randint(2, 4)
    if rng.random() < 0.3:
        fields["stop"] = rng.sample([" ", "\n", "e", "self", "):", "zzz"], rng.randint(1, 3))
    if rng.random() < 0.2:
        fields |= {"top_p": 0.9, "top_k": 20, "presence_penalty": 0.5}
    if rng.random() < 0.2:
        fields["ignore_eos"] = True
    return fields


def long_text(rng: random.Random) -> str:
    """Some hundred words, longer than a chunk: with one of a few beginnings, which fill several
    pages."""
    beginning = " ".join(
        random.Random(rng.randrange(4)).choices(WORDS, k=rng.choice((60, 120, 240)))
    )
    return f"{beginning} {' '.join(rng.choices(WORDS, k=rng.randint(1, 240)))}"


def request(rng: random.Random, rid: str, most: int) -> tuple[str, dict[str, Any]]:
    """A path and a body."""
    path = rng.choice(PATHS)
    fields = sampling(rng, most)
    prompt = long_text(rng) if rng.random() < 0.25 else text(rng)
    body: dict[str, Any] = {"rid": rid}
    if rng.random() < 0.5:
        body["stream"] = True
    if rng.random() < 0.1:
        body["cache_salt"] = rng.choice(("red", "blue"))
    if path == "/generate":
        fields["max_new_tokens"] = fields.pop("max_tokens")
        return path, body | {"text": prompt, "sampling_params": fields}
    if path == "/v1/completions":
        return path, body | fields | {"prompt": prompt}
    return path, body | fields | {"messages": [{"role": "user", "content": prompt}]}


async def complete(
    world: World, path: str, body: dict[str, Any], *, may: Collection[str] = ()
) -> str:
    """Send it and read all of the answer. Returns how it ended; raises `Wrong` for what `world.may`
    or `may` does not allow: "abort" among the reasons, or a status such as "503"."""
    async with Exchange(world.port, "POST", path, body) as exchange:
        status = await exchange.head()
        answer = await exchange.whole()
    if status != 200:
        return _refused(world, str(status), answer, may)
    if body.get("stream"):
        return _stream(world, path, body, answer, may)
    told = json.loads(answer)
    ends = _choices(path, told)
    end = _reasons(world, ends, body, may)
    _keep(world, path, body, texts_of(path, told), ends)
    return end


def _keep(
    world: World,
    path: str,
    body: dict[str, Any],
    texts: dict[int, str],
    ends: dict[int, tuple[str | None, int]],
) -> None:
    """Remember what was said, if it depends on the request alone: a turn depends on its session."""
    if "session_params" not in body:
        reasons = {choice: reason for choice, (reason, _) in ends.items()}
        world.answers.add(Answer(path, body, texts, reasons))


def _refused(world: World, status: str, answer: bytes, may: Collection[str]) -> str:
    message = json.loads(answer)["error"]["message"]
    if status not in may and status not in world.may:
        raise Wrong(f"{status} {message}")
    return f"error {status}"


def _stream(
    world: World, path: str, body: dict[str, Any], answer: bytes, may: Collection[str]
) -> str:
    events = [part.removeprefix(b"data: ") for part in answer.strip().split(b"\n\n")]
    if events[-1] != b"[DONE]":
        raise Lost("a stream without an end")
    last: dict[int, tuple[str | None, int]] = {}
    texts: dict[int, str] = {}
    for event in map(json.loads, events[:-1]):
        if "error" in event:
            return _refused(
                world,
                str(event["error"].get("code") or "error event"),
                json.dumps(event).encode(),
                may,
            )
        for choice, (reason, num_tokens) in _choices(path, event, is_event=True).items():
            if last.get(choice, (None, 0))[0] is not None:
                raise Wrong(f"choice {choice} goes on behind its end")
            last[choice] = (reason, num_tokens)
        _grow(path, event, texts)
    end = _reasons(world, last, body, may)
    _keep(world, path, body, texts, last)
    return end


def _grow(path: str, event: Any, texts: dict[int, str]) -> None:
    """Take in one event: `/generate` repeats the whole text, the others tell what is new."""
    for choice, text in texts_of(path, event).items():
        before = texts.get(choice, "")
        if path != "/generate":
            text = before + text
        elif not text.startswith(before):
            raise Wrong(f"a stream took back what it said: {before!r}, then {text!r}")
        texts[choice] = text


def _choices(
    path: str, answer: Any, *, is_event: bool = False
) -> dict[int, tuple[str | None, int]]:
    """Of each choice: its reason to end, and how many tokens it has (-1: not told)."""
    if path == "/generate":
        parts = answer if isinstance(answer, list) else [answer]
        found = {}
        for place, part in enumerate(parts):
            reason = part["meta_info"]["finish_reason"]
            if not is_event and len(part["output_ids"]) != part["meta_info"]["completion_tokens"]:
                raise Wrong("completion_tokens is not the number of output_ids")
            name = None if reason is None else reason["type"]
            found[part.get("index", place)] = (name, part["meta_info"]["completion_tokens"])
        return found
    return {choice: (reason, -1) for choice, reason in reasons_of(path, answer).items()}


def _reasons(
    world: World,
    ends: dict[int, tuple[str | None, int]],
    body: dict[str, Any],
    may: Collection[str],
) -> str:
    fields = body.get("sampling_params", body)
    wanted = fields.get("n", 1)
    most = fields.get("max_tokens", fields.get("max_new_tokens"))
    if sorted(ends) != list(range(wanted)):
        raise Wrong(f"{len(ends)} of {wanted} completions have come")
    reasons = {reason for reason, _ in ends.values()}
    allowed = {*ENDS, *({"abort"} & {*may, *world.may})}
    if not reasons <= allowed:
        raise Wrong(f"ends with {sorted(map(str, reasons - allowed))}")
    for reason, num_tokens in ends.values():
        if num_tokens > most or (reason == "length" and num_tokens not in (-1, most)):
            raise Wrong(f"{num_tokens} tokens of {most} with the reason {reason}")
        world.ledger.num_tokens += max(num_tokens, 0)
    return "abort" if "abort" in reasons else "complete"


async def leave(world: World, rng: random.Random, path: str, body: dict[str, Any]) -> str:
    """Send it, and go away at some moment: before the answer, in the middle of it, or with a half
    body."""
    async with Exchange(
        world.port, "POST", path, body, half=rng.random() < 0.1
    ) as exchange:  # half: a 408, in time
        pieces = rng.randint(0, 12) if body.get("stream") else 0
        if pieces == 0:
            await asyncio.sleep(rng.random() * 0.3)
        elif await exchange.head() == 200:
            async for _ in exchange.pieces():
                pieces -= 1
                if pieces == 0:
                    break
        if rng.random() < 0.5:
            exchange.reset()
    return "left"


async def read_slowly(world: World, rng: random.Random, path: str, body: dict[str, Any]) -> str:
    """Take a few bytes now and then, and at some time nothing more, until the server cuts it off or
    we give up."""
    until = asyncio.get_running_loop().time() + rng.uniform(0.5, 4.0)
    async with Exchange(world.port, "POST", path, body, receive_buffer=2048) as exchange:
        while asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.1)
            if not await exchange.read_raw(64):
                return "ended"
        await asyncio.sleep(rng.uniform(0, 3.0))
    return "left"

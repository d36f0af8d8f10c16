"""What answers said, and whether it is true: weft promises that an answer is a function of its
request, so the same request, asked again of an idle server that has nothing of it in its cache,
must bring the same text.

This finds tokens that went to another request, pages with another prompt's K and V, text that a
retraction changed, and pieces of streams in the wrong order, whatever caused them.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

from tests.soak.http import Exchange

MAX_KEPT = 400  # answers of a phase
SIDE_BY_SIDE = 4  # questions
FINAL = ("stop", "length")


@dataclass(frozen=True)
class Answer:
    """A request and what came of it."""

    path: str
    body: dict[str, Any]
    texts: dict[int, str]  # choice -> its text
    reasons: dict[int, str | None]  # choice -> why it ended


@dataclass
class Answers:
    """A random sample of the answers of a phase."""

    rng: random.Random
    kept: list[Answer] = field(default_factory=list)
    num_seen: int = 0

    def add(self, answer: Answer) -> None:
        self.num_seen += 1
        if len(self.kept) < MAX_KEPT:
            self.kept.append(answer)
            return
        place = self.rng.randrange(self.num_seen)
        if place < MAX_KEPT:
            self.kept[place] = answer


def texts_of(path: str, answer: Any) -> dict[int, str]:
    """The text of each choice of an answer, or of one event of a stream."""
    if path == "/generate":
        parts = answer if isinstance(answer, list) else [answer]
        return {part.get("index", place): part["text"] for place, part in enumerate(parts)}
    found: dict[int, str] = {}
    for choice in answer["choices"]:
        message = choice.get("message") or choice.get("delta") or {}
        found[choice["index"]] = choice.get("text") or message.get("content") or ""
    return found


def reasons_of(path: str, answer: Any) -> dict[int, str | None]:
    """Why each choice ended; None while it has not."""
    if path != "/generate":
        return {choice["index"]: choice["finish_reason"] for choice in answer["choices"]}
    parts = answer if isinstance(answer, list) else [answer]
    found: dict[int, str | None] = {}
    for place, part in enumerate(parts):
        reason = part["meta_info"]["finish_reason"]
        found[part.get("index", place)] = None if reason is None else reason["type"]
    return found


async def ask_again(
    port: int, answers: Answers, seconds: float, name: str
) -> tuple[int, list[str]]:
    """Ask a random order of them again for so long. Returns how many were compared, and the
    differences.

    The server must be idle. Each question has a salt of its own, so that it finds nothing in the
    cache.
    """
    order = list(answers.kept)
    answers.rng.shuffle(order)
    until = time.monotonic() + seconds
    differences: list[str] = []
    compared = 0

    async def work() -> None:
        nonlocal compared
        while order and time.monotonic() < until:
            answer = order.pop()
            compared += 1
            differences.extend(await _compared(port, answer, f"{name}-{compared}"))

    await asyncio.gather(*(work() for _ in range(SIDE_BY_SIDE)))
    return compared, differences


async def _compared(port: int, answer: Answer, salt: str) -> list[str]:
    body = {key: value for key, value in answer.body.items() if key not in ("stream", "rid")}
    async with Exchange(port, "POST", answer.path, body | {"cache_salt": salt}) as exchange:
        status = await exchange.head()
        told = json.loads(await exchange.whole())
    if status != 200:
        return [f"asked again: {status} {told}"]
    texts = texts_of(answer.path, told)
    reasons = reasons_of(answer.path, told)
    found = []
    for choice, text in answer.texts.items():
        if not _is_same(text, answer.reasons[choice], texts[choice], reasons[choice]):
            found.append(
                f"{answer.body.get('rid')} choice {choice} of {answer.path} said {text!r} "
                f"({answer.reasons[choice]}), asked again {texts[choice]!r} ({reasons[choice]})"
            )
    return found


def _is_same(text: str, reason: str | None, truth: str, true_reason: str | None) -> bool:
    """An answer that was aborted must be the beginning of the true one."""
    if reason in FINAL:
        return (text, reason) == (truth, true_reason)
    return truth.startswith(text.rstrip("\ufffd"))

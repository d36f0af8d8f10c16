"""Texts through parsers, in pieces, and what comes out of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from weft.text.parsers.events import AnswerText, CallArguments, CallBegin, Event, ReasoningText
from weft.text.parsers.output import Parser


def cut_at(text: str, places: Iterable[int]) -> list[str]:
    """The pieces of `text` between these places."""
    pieces: list[str] = []
    start = 0
    for place in sorted({min(place, len(text)) for place in places}):
        pieces.append(text[start:place])
        start = place
    return [*pieces, text[start:]]


def parse(parser: Parser, pieces: Sequence[str]) -> list[Event]:
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    return joined(events + parser.flush())


def joined(events: Iterable[Event]) -> list[Event]:
    """Neighbouring pieces of the same text as one."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, CallArguments) and isinstance(last, CallArguments):
            if event.call == last.call:
                result[-1] = CallArguments(event.call, last.text + event.text)
                continue
        elif isinstance(event, AnswerText) and isinstance(last, AnswerText):
            result[-1] = AnswerText(last.text + event.text)
            continue
        elif isinstance(event, ReasoningText) and isinstance(last, ReasoningText):
            result[-1] = ReasoningText(last.text + event.text)
            continue
        result.append(event)
    return result


def answer_text(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, AnswerText))


def reasoning_text(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, ReasoningText))


def argument_texts(events: Iterable[Event]) -> list[tuple[str, str]]:
    """The name and the arguments of each call, as they were told."""
    names: list[str] = []
    pieces: dict[int, str] = {}
    for event in events:
        if isinstance(event, CallBegin):
            names.append(event.name)
        elif isinstance(event, CallArguments):
            pieces[event.call] = pieces.get(event.call, "") + event.text
    return [(name, pieces.get(call, "")) for call, name in enumerate(names)]


def calls_in(events: Iterable[Event]) -> list[tuple[str, Any]]:
    return [(name, json.loads(text)) for name, text in argument_texts(events)]

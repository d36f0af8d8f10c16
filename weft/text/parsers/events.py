"""The events that parsers find in a model's text, in the order of the text."""

from __future__ import annotations

from typing import NamedTuple


class AnswerText(NamedTuple):
    """A piece of the answer itself."""

    text: str


class ReasoningText(NamedTuple):
    """A piece of the reasoning before the answer."""

    text: str


class CallBegin(NamedTuple):
    """A tool call begins; calls are numbered from 0."""

    call: int
    name: str


class CallArguments(NamedTuple):
    """A piece of the arguments of call number `call`. The concatenated pieces are a JSON object."""

    call: int
    text: str


Event = AnswerText | ReasoningText | CallBegin | CallArguments

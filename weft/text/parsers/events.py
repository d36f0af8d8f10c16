"""What parsers find in a model's text, in the order in which it was written."""

from __future__ import annotations

from typing import NamedTuple


class AnswerText(NamedTuple):
    """A piece of the answer itself."""

    text: str


class ReasoningText(NamedTuple):
    """A piece of what the model thinks before its answer."""

    text: str


class CallBegin(NamedTuple):
    """The next tool call; calls are numbered from 0."""

    call: int
    name: str


class CallArguments(NamedTuple):
    """A piece of the arguments of call number `call`: all pieces together are a JSON object."""

    call: int
    text: str


Event = AnswerText | ReasoningText | CallBegin | CallArguments

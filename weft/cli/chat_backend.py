"""The interface of `weft chat` to the source of answers: a model in this process, or a server."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from weft.json_types import JsonObject


class ChatError(Exception):
    """This answer failed; the conversation can go on. The message is for the user."""


class ChatBackend(Protocol):
    name: str

    def answer(self, messages: list[JsonObject]) -> Generator[str, None, None]:
        """Yield the next answer in pieces of text. Closing the generator early ends the request.
        Raises ChatError."""
        ...

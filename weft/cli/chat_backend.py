"""What `weft chat` needs of whoever answers."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from weft.json_types import JsonObject


class ChatError(Exception):
    """This answer failed; the conversation can go on. The message is for the user."""


class ChatBackend(Protocol):
    name: str

    def answer(self, messages: list[JsonObject]) -> Generator[str, None, None]:
        """The next answer in pieces of text. Closing it early ends the request.
        Raises ChatError.
        """
        ...

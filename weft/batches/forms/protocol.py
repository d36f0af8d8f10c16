"""What an API says of the lines of its batches."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from weft.json_types import JsonObject


class BadLine(Exception):
    """A line that asks for nothing that can be answered. The message is for the client."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


class LineRequest(NamedTuple):
    """What one line asks for."""

    custom_id: str
    path: str  # of the route
    body: JsonObject


class RouteAnswer(NamedTuple):
    """The answer of a route to one line."""

    status: int
    body: JsonObject
    request_id: str
    code: str = ""  # of an error; "": it has none


class WrittenLine(NamedTuple):
    """A line of the results."""

    is_error: bool  # it belongs in the file of errors, if the API has one
    fields: JsonObject


class Form(Protocol):
    """A form has no state."""

    name: str
    paths: tuple[str, ...]  # routes that lines may ask
    has_error_file: bool  # else all results are in one file

    def work(self, line: bytes, path: str) -> LineRequest:
        """What a line asks of the route `path`. Raises BadLine."""
        ...

    def answered(self, id: str, custom_id: str, answer: RouteAnswer) -> WrittenLine:
        """The result of a line that was answered. `id`: the name of the line in its batch."""
        ...

    def ended(self, id: str, custom_id: str | None, kind: str, message: str) -> WrittenLine:
        """The result of a line without an answer: it is `invalid`, `expired` or `cancelled`."""
        ...

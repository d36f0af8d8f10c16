"""OpenAI's batches: lines with a method and a path, an output file and an error file."""

from __future__ import annotations

from typing import Any

import msgspec

from weft.batches.forms.protocol import BadLine, LineRequest, RouteAnswer, WrittenLine
from weft.config.numbers import shown
from weft.json_types import JsonObject

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_ID_LEN = 512  # characters of a `custom_id`
CODES = {"invalid": "invalid_request", "expired": "batch_expired", "cancelled": "batch_cancelled"}


class OpenAILine(msgspec.Struct, kw_only=True):
    custom_id: str
    body: JsonObject
    method: str = "POST"
    url: str = ""


class OpenAIForm:
    name = "openai"
    paths: tuple[str, ...] = PATHS
    has_error_file = True

    def work(self, line: bytes, path: str) -> LineRequest:
        found = decoded(line, OpenAILine)
        if found.method != "POST":
            raise BadLine(f"method is {shown(found.method)}; POST is allowed", found.custom_id)
        if found.url and found.url != path:
            raise BadLine(
                f"url is {shown(found.url)}; the endpoint of this batch is {path}", found.custom_id
            )
        check_line(found.custom_id, found.body)
        return LineRequest(found.custom_id, path, found.body)

    def answered(self, id: str, custom_id: str, answer: RouteAnswer) -> WrittenLine:
        response = {
            "status_code": answer.status,
            "request_id": answer.request_id,
            "body": answer.body,
        }
        fields = {"id": id, "custom_id": custom_id, "response": response, "error": None}
        return WrittenLine(answer.status >= 400, fields)

    def ended(self, id: str, custom_id: str | None, kind: str, message: str) -> WrittenLine:
        error = {"code": CODES[kind], "message": message}
        fields = {"id": id, "custom_id": custom_id, "response": None, "error": error}
        return WrittenLine(True, fields)


def decoded(line: bytes, type: type[Any]) -> Any:
    """A line as a `type`. Raises BadLine."""
    try:
        return msgspec.json.decode(line, type=type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadLine(f"this line cannot be read: {exc}", _custom_id(line)) from exc


def check_line(custom_id: str, body: JsonObject) -> None:
    """Raises BadLine for a line that no batch can answer."""
    if not 0 < len(custom_id) <= MAX_ID_LEN:
        message = f"custom_id has {len(custom_id):,} characters; 1 to {MAX_ID_LEN} are allowed"
        raise BadLine(message, custom_id[:MAX_ID_LEN] or None)
    for name in ("stream", "background"):
        if body.get(name):
            raise BadLine(f"{name} is true; lines of a batch have whole answers", custom_id)


def _custom_id(line: bytes) -> str | None:
    """The `custom_id` of a line that is wrong elsewhere."""

    class OnlyId(msgspec.Struct):
        custom_id: str | None = None

    try:
        return msgspec.json.decode(line, type=OnlyId).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


OPENAI = OpenAIForm()

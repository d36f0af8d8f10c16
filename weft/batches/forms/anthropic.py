"""Anthropic's message batches: lines with `params`, and one file of results."""

from __future__ import annotations

import msgspec

from weft.batches.forms.openai import check_line, decoded
from weft.batches.forms.protocol import LineRequest, RouteAnswer, WrittenLine
from weft.json_types import JsonObject

PATH = "/v1/messages"


class AnthropicLine(msgspec.Struct, kw_only=True):
    custom_id: str
    params: JsonObject


class AnthropicForm:
    name = "anthropic"
    paths: tuple[str, ...] = (PATH,)
    has_error_file = False

    def work(self, line: bytes, path: str) -> LineRequest:
        found = decoded(line, AnthropicLine)
        check_line(found.custom_id, found.params)
        return LineRequest(found.custom_id, path, found.params)

    def answered(self, id: str, custom_id: str, answer: RouteAnswer) -> WrittenLine:
        if answer.status >= 400:
            result = {"type": "errored", "error": answer.body}
        else:
            result = {"type": "succeeded", "message": answer.body}
        return WrittenLine(answer.status >= 400, self._line(id, custom_id, result))

    def ended(self, id: str, custom_id: str | None, kind: str, message: str) -> WrittenLine:
        if kind == "expired":
            result: JsonObject = {"type": "expired"}
        elif kind == "cancelled":
            result = {"type": "canceled"}
        else:
            error = {"type": "invalid_request_error", "message": message}
            result = {"type": "errored", "error": {"type": "error", "error": error}}
        return WrittenLine(True, self._line(id, custom_id, result))

    @staticmethod
    def _line(id: str, custom_id: str | None, result: JsonObject) -> JsonObject:
        # `id` is weft's own: it tells which line was answered, also one without a `custom_id`.
        return {"id": id, "custom_id": custom_id, "result": result}


ANTHROPIC = AnthropicForm()

"""`/parse_function_call` and `/separate_reasoning`, with SGLang's fields.

They apply the parsers of answers to a text from the client, for clients that got a model's text
elsewhere, such as from `/generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.json_types import JsonObject
from weft.server.body import json_response, read_json
from weft.server.chat.models import ChatAnswer
from weft.server.chat.tools import tool_use
from weft.server.context import ServerContext
from weft.server.errors import ApiError, over
from weft.server.openai.chat import answer_of, function_calls
from weft.server.operation import post
from weft.text.parsers.formats import (
    reasoning_format,
    reasoning_parser_names,
    tool_format,
    tool_parser_names,
)
from weft.text.parsers.output import ParsedOutput

INLINE_LEN = 10_000  # characters; longer texts are parsed in a thread
T = TypeVar("T")


class ParseCallsBody(msgspec.Struct, kw_only=True):
    """`tool_call_parser`: a value of `--tool-call-parser`; default: the server's own parser."""

    text: str
    tools: list[JsonObject]
    tool_call_parser: str | None = None


class SeparateBody(msgspec.Struct, kw_only=True):
    """`reasoning_parser`: a value of `--reasoning-parser`; default: the server's own parser."""

    text: str
    reasoning_parser: str | None = None


async def parse_function_call(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, ParseCallsBody)
    format = _chosen(
        tool_format,
        tool_parser_names(),
        body.tool_call_parser,
        context.formats.tools,
        "tool_call_parser",
    )
    use = tool_use(body.tools, "auto", parallel=True)
    parser = format.parser(use.names, eager=False, schemas=use.schemas)
    answer = await _parsed(context, body.text, ParsedOutput(None, parser))
    calls: list[JsonObject] = []
    for index, call in enumerate(function_calls(answer)):
        function = call.function
        calls.append(
            {
                "tool_index": index,
                "name": function.name,
                "parameters": function.arguments,
            }
        )
    return json_response({"normal_text": answer.content or "", "calls": calls})


async def separate_reasoning(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, SeparateBody)
    format = _chosen(
        reasoning_format,
        reasoning_parser_names(),
        body.reasoning_parser,
        context.formats.reasoning,
        "reasoning_parser",
    )
    answer = await _parsed(context, body.text, ParsedOutput(format.parser("", eager=False), None))
    return json_response(
        {"reasoning_text": answer.reasoning_content or "", "text": answer.content or ""}
    )


async def _parsed(
    context: ServerContext,
    text: str,
    output: ParsedOutput,
) -> ChatAnswer:
    """The message that `output` parses from the whole text."""
    longest = context.limits.max_parsed_len
    if len(text) > longest:
        message = f"text has {len(text):,} characters; at most {longest:,} are allowed"
        raise over("max_parsed_len", message, param="text")

    def work() -> ChatAnswer:
        return answer_of(output.push(text, is_last=True), call_id_len=24)

    if len(text) <= INLINE_LEN:
        return work()
    return await context.readers.run(work, is_long=True)


def _chosen(
    find: Callable[[str], T],
    names: Sequence[str],
    name: str | None,
    own: T | None,
    param: str,
) -> T:
    """The format of that name, else the server's. Raises `ApiError`."""
    found = own
    what = "is not known for this model; name one of"
    if name not in (None, "auto"):
        found = None
        if name in names and name != "none":
            found = find(name)
        what = f"is {name!r:.64}, which does not exist; known are"
    if found is None:
        known = [one for one in names if one not in ("auto", "none")]
        raise ApiError(400, f"{param} {what} {', '.join(known)}", param=param)
    return found


ROUTES = (
    post(
        "/parse_function_call",
        parse_function_call,
        "Find the tool calls in a text (SGLang)",
        ParseCallsBody,
    ),
    post(
        "/separate_reasoning",
        separate_reasoning,
        "Find the reasoning in a text (SGLang)",
        SeparateBody,
    ),
)

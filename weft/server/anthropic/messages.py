"""`POST /v1/messages` and `POST /v1/messages/count_tokens`, as clients of Anthropic's API expect
them.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from weft.server.anthropic.marks import messages_marks
from weft.server.anthropic.models import CountRequest, MessagesRequest, TokenCount
from weft.server.anthropic.reply import ANTHROPIC_EVENTS, MessagesReply
from weft.server.anthropic.translate import (
    chat_request,
    open_signatures,
    sampled_request,
    warnings_of,
)
from weft.server.body import json_response, read_json
from weft.server.chat.answers import answer_header
from weft.server.chat.conversation import chat_prompt, start_chat
from weft.server.chat.sealed import Opener
from weft.server.context import ServerContext
from weft.server.operation import post
from weft.server.stream import Answer


async def messages(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, MessagesRequest)
    open_signatures(body, Opener(context.limits))
    marks = messages_marks(body)
    conversation = await start_chat(context, request, sampled_request(body), marks=marks)
    conversation.generation.warn(warnings_of(body))
    header = answer_header(context, "msg_", conversation.request.rid, body.model, body.lora_path)
    reply = MessagesReply(header, conversation)
    return Answer(conversation.generation, reply, ANTHROPIC_EVENTS)


async def count_tokens(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, CountRequest)
    open_signatures(body, Opener(context.limits))
    prompt = await chat_prompt(context, chat_request(body))
    return json_response(TokenCount(len(prompt.ids)))


ROUTES = (
    post(
        "/v1/messages",
        messages,
        "Continue a conversation (Anthropic)",
        MessagesRequest,
    ),
    post(
        "/v1/messages/count_tokens",
        count_tokens,
        "Count the tokens of a conversation (Anthropic)",
        CountRequest,
        answer=TokenCount,
    ),
)

"""`/v1/responses`: create, retrieve, list the input, cancel, delete."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weft.client.generation import Delta
from weft.json_types import JsonObject
from weft.server.auth import owner_of
from weft.server.body import json_response, read_json
from weft.server.chat.conversation import Conversation, chat_prompt, start_chat
from weft.server.chat.models import ChatMessage, InputTokens
from weft.server.chat.sealed import Opener
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.model_names import answering_name
from weft.server.openai.responses.input_items import input_items, page
from weft.server.openai.responses.models import ResponsesRequest
from weft.server.openai.responses.reply import RESPONSE_EVENTS, ResponseReply
from weft.server.openai.responses.tools import offered_tools
from weft.server.openai.responses.translate import (
    SEALED_REASONING,
    chat_request,
    check_include,
    errors_name_input,
    messages,
    output_items,
    warning_of,
)
from weft.server.operation import Operation, get, post
from weft.server.response_store import Stored
from weft.server.stream import Answer
from weft.state.store import StateError

CANCEL_TIMEOUT_S = 5.0  # for the engine's last reply


async def create(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, ResponsesRequest)
    if body.background and (body.stream or body.store is False):
        message = "background needs a response that is stored and not streamed"
        raise ApiError(400, message, param="background")
    left_out: Counter[str] = Counter()
    previous = _previous(context, request, body.previous_response_id)
    opener = Opener(context.limits)
    history = messages(body.items, opener, previous, left_out)
    check_include(body.include)
    if not history:
        raise ApiError(400, "input is empty; at least one item is needed", param="input")
    offered = offered_tools(body.tools, body.tool_choice)
    items: list[JsonObject] = []
    if body.store is not False:
        context.responses.require_room()
        items = input_items(body.items)
    id = f"resp_{secrets.token_hex(24)}"
    with errors_name_input():
        chat = chat_request(body, history, offered, id)
        conversation = await start_chat(context, request, chat)
    conversation.generation.warn((*offered.warnings, *warning_of(left_out)))

    reply = ResponseReply(
        _new(context, body, id),
        conversation,
        context.tokenizer,
        names=offered.names,
        seals_reasoning=SEALED_REASONING in (body.include or ()),
    )

    def store() -> None:
        """Store the response with its end, in the event loop: the store belongs to it."""
        output = output_items(reply.response)
        conversation_so_far = messages(output, Opener(context.limits), history)
        context.responses.put(reply.response, conversation_so_far, owner_of(request), items)

    async def keep() -> None:
        # Its end may have come while the head of a stream was sent: then it is still to be read.
        if reply.response["status"] != "in_progress":
            store()
        await _settle(context)

    if body.store is not False:
        conversation.generation.before_end = keep
    if not body.background:
        return Answer(conversation.generation, reply, RESPONSE_EVENTS)
    context.responses.put(reply.response, history, owner_of(request), items)
    queued = json_response({**reply.response, "status": "queued"})  # before there is any output
    task = asyncio.create_task(_generate(conversation, reply, store))
    context.responses.running[id] = task
    task.add_done_callback(lambda _: context.responses.running.pop(id, None))
    try:
        await _settle(context)
    except StateError:  # the client does not learn the id
        conversation.generation.close()
        await asyncio.wait({task})
        context.responses.drop(id)
        raise
    return queued


async def input_tokens(context: ServerContext, request: Request) -> ASGIApp:
    """The number of tokens of a response's prompt."""
    body = await read_json(context, request, ResponsesRequest)
    previous = _previous(context, request, body.previous_response_id)
    history = messages(body.items, Opener(context.limits), previous)
    offered = offered_tools(body.tools, body.tool_choice)
    with errors_name_input():
        prompt = await chat_prompt(context, chat_request(body, history, offered, ""))
    return json_response(InputTokens(len(prompt.ids)))


async def retrieve(context: ServerContext, request: Request) -> ASGIApp:
    if request.query_params.get("stream", "false") not in ("false", "0"):
        raise ApiError(400, "a stored response cannot be streamed", param="stream")
    stored = _stored(context, request, request.path_params["id"])
    await _settle(context)
    return _as_stored(stored)


async def list_input_items(context: ServerContext, request: Request) -> ASGIApp:
    """The input of a stored response, page by page."""
    stored = _stored(context, request, request.path_params["id"])
    return json_response(page(stored.items, request))


async def cancel(context: ServerContext, request: Request) -> ASGIApp:
    """End a background response. Its output so far is stored."""
    id = request.path_params["id"]
    stored = _stored(context, request, id)
    task = context.responses.running.get(id)
    if task is None:
        if not stored.is_background:
            raise ApiError(400, "only a background response can be cancelled", param="response_id")
        return _as_stored(stored)
    context.client.deliveries.abort(id)
    await asyncio.wait({task}, timeout=CANCEL_TIMEOUT_S)
    stored = _stored(context, request, id)
    await _settle(context)
    return _as_stored(stored)


async def delete(context: ServerContext, request: Request) -> ASGIApp:
    id = request.path_params["id"]
    _stored(context, request, id)
    task = context.responses.running.get(id)
    if task is not None:
        context.client.deliveries.abort(id)
        await asyncio.wait({task}, timeout=CANCEL_TIMEOUT_S)
    context.responses.drop(id)
    await _settle(context)
    return json_response(
        {
            "id": id,
            "object": "response",
            "deleted": True,
        }
    )


async def _generate(
    conversation: Conversation,
    reply: ResponseReply,
    store: Callable[[], None],
) -> None:
    """Run a background response: no client waits, and the response is stored at its end."""
    found: list[Delta] = []
    with conversation.generation as generation:
        async for deltas in generation:
            found += deltas
        if generation.closed:  # nobody can ask for it
            return
        reply.full_body(found)
        store()


def _previous(
    context: ServerContext,
    request: Request,
    id: str | None,
) -> list[ChatMessage]:
    if id is None:
        return []
    stored = _stored(context, request, id, "previous_response_id")
    if id in context.responses.running:
        raise ApiError(400, "the previous response has not ended yet", param="previous_response_id")
    return msgspec.convert(stored.history, list[ChatMessage])


def _stored(
    context: ServerContext, request: Request, id: str, param: str = "response_id"
) -> Stored:
    stored = context.responses.get(id, owner_of(request))
    if stored is None:
        message = f"there is no response {id[:64]!r}; responses are kept for an hour"
        raise ApiError(404, message, param=param)
    return stored


def _as_stored(stored: Stored) -> ASGIApp:
    return Response(stored.response_json, media_type="application/json")


async def _settle(context: ServerContext) -> None:
    """Before a client learns of a stored response: what it learns must be on disk."""
    if context.responses.settled is not None:
        await context.responses.settled()


def _new(context: ServerContext, body: ResponsesRequest, id: str) -> JsonObject:
    """The response before any output."""
    temperature = body.temperature
    if temperature is None:
        temperature = context.info.sampling.temperature
    top_p = body.top_p
    if top_p is None:
        top_p = context.info.sampling.top_p
    format: JsonObject = {"type": "text"}
    if body.text is not None and body.text.format:
        format = body.text.format
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": answering_name(context, body.model, body.lora_path),
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": msgspec.to_builtins(body.reasoning),
        "store": body.store is not False,
        "temperature": temperature,
        "text": {"format": format},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


ROUTES = (
    post("/v1/responses", create, "Create a response", ResponsesRequest),
    post(
        "/v1/responses/input_tokens",
        input_tokens,
        "Count the tokens of a response's prompt",
        ResponsesRequest,
        answer=InputTokens,
    ),
    get("/v1/responses/{id}", retrieve, "A stored response"),
    get(
        "/v1/responses/{id}/input_items",
        list_input_items,
        "The input of a stored response",
        query=("limit",),
    ),
    Operation("DELETE", "/v1/responses/{id}", delete, "Forget a stored response"),
    post("/v1/responses/{id}/cancel", cancel, "Cancel a background response"),
)

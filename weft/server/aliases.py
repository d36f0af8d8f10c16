"""Routes of vLLM and Amazon SageMaker that weft offers under another name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message

from weft.observe.log import EventLog
from weft.server.body import json_response, read_body, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.openai.chat import chat_completions
from weft.server.openai.completions import completions
from weft.server.openai.models import ChatMessage
from weft.server.operation import Handler, get, post
from weft.server.pooling.embeddings import embeddings
from weft.server.pooling.models import EmbeddingInput

log = EventLog("admin")

_BY_FIELD: dict[str, Handler] = {
    "messages": chat_completions,
    "prompt": completions,
    "input": embeddings,
}


class Invocation(msgspec.Struct, kw_only=True):
    """The body of a chat or text completion, or of embeddings."""

    messages: list[ChatMessage] | None = None
    prompt: str | list[str | int | list[int]] | None = None
    input: EmbeddingInput | None = None


class AbortManyRequest(msgspec.Struct, kw_only=True):
    """Abort requests by their exact names; without names, abort all requests."""

    request_ids: list[str] | None = None


async def load(context: ServerContext, request: Request) -> ASGIApp:
    """vLLM's measure of load: the number of open completions."""
    return json_response({"server_load": context.client.num_open})


async def abort_requests(context: ServerContext, request: Request) -> ASGIApp:
    """Abort the requests of these names, or all. Answers with their number."""
    body = await read_json(context, request, AbortManyRequest)
    client = context.client
    names = set(body.request_ids or ())
    aborted = sum(map(client.abort, names)) if names else client.abort_all()
    log.info("abort_requests", names=len(names), aborted=aborted)
    return json_response({"aborted": aborted})


async def invocations(context: ServerContext, request: Request) -> ASGIApp:
    """SageMaker's only route for inference: completions or embeddings, selected by the fields of
    the body."""
    limits = context.limits
    body = await read_body(request, int(limits.max_body_mb * 1_000_000), limits.body_timeout_s)
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ApiError(400, f"the body is not valid JSON: {exc}") from exc
    for field, handler in _BY_FIELD.items():
        if field in fields:
            return await handler(context, Request(request.scope, _again(body)))
    raise ApiError(400, "the body has neither messages nor prompt nor input", param="messages")


def _again(body: bytes) -> Callable[[], Awaitable[Message]]:
    """A `receive` that returns a body which has already been read."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


ROUTES = (
    post(
        "/invocations",
        invocations,
        "Chat or text completion, by its fields (SageMaker)",
        Invocation,
    ),
    get("/load", load, "How many completions are open (vLLM)"),
    post(
        "/abort_requests",
        abort_requests,
        "Abort requests, all if none is named (vLLM)",
        AbortManyRequest,
        access="admin",
    ),
)

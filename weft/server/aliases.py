"""Routes of vLLM, Amazon SageMaker and Azure OpenAI that weft offers under another name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message

from weft.observe.log import EventLog
from weft.server.admin.facts import models
from weft.server.body import json_response, read_body, read_json
from weft.server.chat.models import ChatMessage, ChatRequest, CompletionRequest
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.openai.chat import chat_completions
from weft.server.openai.completions import completions
from weft.server.openai.responses.models import ResponsesRequest
from weft.server.openai.responses.routes import create
from weft.server.operation import Handler, Operation, get, post
from weft.server.pooling.embeddings import embeddings
from weft.server.pooling.models import EmbeddingInput, EmbeddingRequest

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
    aborted = sum(map(client.deliveries.abort, names)) if names else client.deliveries.abort_all()
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
        if _has(fields, field):
            return await handler(context, Request(request.scope, _again(body)))
    raise ApiError(400, "the body has neither messages nor prompt nor input", param="messages")


def _has(fields: dict[str, msgspec.Raw], field: str) -> bool:
    """Whether a body has a value of this name: null is none."""
    return bytes(fields.get(field, msgspec.Raw(b"null"))) != b"null"


def _again(body: bytes) -> Callable[[], Awaitable[Message]]:
    """A `receive` that returns a body which has already been read."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def _deployed(handler: Handler) -> Handler:
    """`handler` below the path of a deployment, which names the model if the body does not."""

    async def answer(context: ServerContext, request: Request) -> ASGIApp:
        limits = context.limits
        body = await read_body(request, int(limits.max_body_mb * 1_000_000), limits.body_timeout_s)
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            fields = None  # the handler tells what is wrong
        if fields is not None and not _has(fields, "model"):
            fields["model"] = msgspec.Raw(msgspec.json.encode(request.path_params["deployment"]))
            body = msgspec.json.encode(fields)
        return await handler(context, Request(request.scope, _again(body)))

    return answer


def _azure(
    path: str,
    handler: Handler,
    summary: str,
    body: type[msgspec.Struct],
    *,
    is_deployed: bool = True,
) -> list[Operation]:
    """The routes of Azure OpenAI for `path`: the current one, and the one of a deployment."""
    found = [post(f"/openai/v1/{path}", handler, f"{summary} (Azure)", body)]
    if is_deployed:
        of_deployment = f"/openai/deployments/{{deployment:path}}/{path}"
        found.append(post(of_deployment, _deployed(handler), f"{summary} (Azure)", body))
    return found


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
    *_azure("chat/completions", chat_completions, "Continue a conversation", ChatRequest),
    *_azure("completions", completions, "Continue a text", CompletionRequest),
    *_azure("embeddings", embeddings, "Vectors of texts", EmbeddingRequest),
    *_azure("responses", create, "Create a response", ResponsesRequest, is_deployed=False),
    get("/openai/v1/models", models, "The models that are served, and adapters (Azure)"),
)

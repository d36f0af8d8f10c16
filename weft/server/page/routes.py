"""Routes of the live page: its files, which are public, and the stream of pictures, which is for
administrators."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp

from weft.client.feed import Viewer, event
from weft.config.generation import KINDS
from weft.config.origins import origins_of
from weft.json_types import JsonObject
from weft.server.auth import owner_of
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.operation import get
from weft.server.page.files import INDEX, PageFile, policy, read_files

EVENTS = "text/event-stream"
STREAM_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies must not collect events
}
FILES = read_files()
GREETING = (
    "API      /v1/chat/completions /v1/completions /v1/models /generate /tokenize /detokenize\n"
    "vectors  /v1/embeddings /v1/rerank /v1/score /v1/classify\n"
    "also     /v1/responses /v1/messages (Anthropic) /api/chat (Ollama)\n"
    "health   /health /ready /health_generate\n"
    "metrics  /metrics\n"
    "schema   /openapi.json\n"
)


async def front(context: ServerContext, request: Request) -> ASGIApp:
    """The live page for browsers; a short text for other clients."""
    wants_page = "text/html" in request.headers.get(
        "accept",
        "",
    )
    if wants_page and context.config.page:
        return _file(context, FILES[INDEX], request)
    facts = f"weft {context.info.version} is running {context.info.model_name}"
    if context.has_keys and not owner_of(request):
        facts = "weft is running"
    return PlainTextResponse(
        f"{facts}\n\n{GREETING}",
        headers={"vary": "accept"},
    )


async def file(context: ServerContext, request: Request) -> ASGIApp:
    """A file of the live page."""
    name = request.path_params["name"]
    found = FILES.get(name)
    if found is None or not context.config.page:
        raise ApiError(
            404,
            f"the page has no file {name[:64]!r}",
        )
    return _file(context, found, request)


def _file(context: ServerContext, found: PageFile, request: Request) -> Response:
    headers = {**found.headers, "vary": "accept, accept-encoding"}
    origins = origins_of(context.config.page_mcp_origins)
    if origins:
        headers["content-security-policy"] = policy(origins)
    if found.is_known(
        request.headers.get(
            "if-none-match",
            "",
        )
    ):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        return Response(found.packed, headers=headers)
    return Response(found.body, headers=headers)


async def events(context: ServerContext, request: Request) -> ASGIApp:
    """The activity of the engine as server-sent events: `hello` first, and again when the engine is
    ready; then `picture`, at most five per second, and `away` while there is no engine."""
    feed = context.feed
    if feed.is_full:
        raise ApiError(
            503,
            "too many pages are open; try again later",
            headers={"retry-after": "10"},
        )
    if request.method == "HEAD":  # its answer has no end otherwise
        return Response(media_type=EVENTS, headers=STREAM_HEADERS)
    return _Stream(context)


def _facts(context: ServerContext) -> JsonObject:
    """Facts about the server for the page."""
    info = context.info
    ready = context.client.state.ready
    kinds: list[str] = []
    if context.media is not None:
        kinds = list(context.media.marks)
    return {
        "version": info.version,
        "model": info.model_name,
        "summary": info.model_summary or (ready.model_summary if ready else ""),
        "context": info.context_length,
        "page_size": ready.page_size if ready else 0,
        "started_at": info.started_at,
        "now": time.time(),
        "policy": info.settings.get("schedule_policy", ""),
        "has_chat": context.template is not None and (ready is None or ready.pools is None),
        "takes": kinds,
        "defaults": _defaults(context),
        "mcp_origins": origins_of(context.config.page_mcp_origins),
        "has_experts": ready is not None and ready.has_experts,
        "journals": info.journals,
    }


def _defaults(context: ServerContext) -> JsonObject:
    """The numbers of sampling of a request that gives none."""
    return {name: getattr(context.info.sampling, name) for name in KINDS}


class _Stream:
    """The answer: events until the client leaves or the server stops."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        feed = self._context.feed
        viewer = feed.join()
        try:
            answer = StreamingResponse(
                self._events(viewer), media_type=EVENTS, headers=STREAM_HEADERS
            )
            await answer(scope, receive, send)
        finally:
            feed.leave(viewer)

    async def _events(self, viewer: Viewer) -> Any:
        state = self._context.client.state
        greeted = state.ready
        yield event("hello", _facts(self._context))
        async for picture in viewer:
            if state.ready is not greeted:
                # More facts are known once the engine is ready.
                greeted = state.ready
                yield event("hello", _facts(self._context))
            yield picture


ROUTES = (
    get(
        "/",
        front,
        "The live page; a short text for programs",
        access="page",
    ),
    get(
        "/page/{name:path}",
        file,
        "A file of the live page",
        access="page",
    ),
    get(
        "/events",
        events,
        "Pictures of the engine's work, as they come",
        access="admin",
    ),
)

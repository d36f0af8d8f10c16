"""The HTTP application: the table of routes, and how a request gets from there to its handler and back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.config.server import ServerConfig
from weft.observe.log import EventLog
from weft.server import admin, health, insight, native, policy, tokens
from weft.server.auth import Access, Keys
from weft.server.body import json_bytes
from weft.server.edge import Edge
from weft.server.errors import ClientGone, error_response
from weft.server.info import Front, Readiness, ServerInfo
from weft.server.openai import chat, completions, models
from weft.server.openapi import openapi_document
from weft.text.chat_template import ChatTemplate, TemplateError
from weft.text.client import EngineClient
from weft.text.tokenizer import Tokenizer

log = EventLog("server")

Handler = Callable[[Front, Request], Awaitable[ASGIApp]]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One route."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    access: Access = "user"

    @property
    def is_open(self) -> bool:
        return self.access == "open"


def _get(path: str, handler: Handler, summary: str, **options: object) -> Operation:
    return Operation(method="GET", path=path, handler=handler, summary=summary, **options)  # type: ignore[arg-type]


def _post(path: str, handler: Handler, summary: str, **options: object) -> Operation:
    return Operation(method="POST", path=path, handler=handler, summary=summary, **options)  # type: ignore[arg-type]


OPERATIONS = (
    _post(
        *("/v1/chat/completions", chat.chat_completions, "Continue a conversation"),
        body=models.ChatRequest,
        answer=models.ChatCompletion,
    ),
    _post(
        *("/v1/completions", completions.completions, "Continue texts or token ids"),
        body=models.CompletionRequest,
        answer=models.Completion,
    ),
    _get("/v1/models", admin.models, "The model that is served", answer=models.ModelList),
    _get("/v1/models/{id:path}", admin.model, "One model", answer=models.Model),
    _post("/generate", native.generate, "Continue texts or token ids (SGLang)", body=native.GenerateBody),
    Operation(
        method="PUT",
        path="/generate",
        handler=native.generate,
        summary="The same as POST",
        body=native.GenerateBody,
    ),
    _post("/tokenize", tokens.tokenize, "Text or messages to token ids", body=tokens.TokenizeRequest),
    _post("/v1/tokenize", tokens.tokenize, "Text or messages to token ids", body=tokens.TokenizeRequest),
    _post("/detokenize", tokens.detokenize, "Token ids to text", body=tokens.DetokenizeRequest),
    _post("/v1/detokenize", tokens.detokenize, "Token ids to text", body=tokens.DetokenizeRequest),
    _get("/health", health.health, "Is the engine alive?", access="open"),
    _get("/ready", health.ready, "Is new work accepted?", access="open"),
    _get("/health_generate", health.health_generate, "Generate one token"),
    _get("/version", health.version, "Version of weft"),
    _get("/metrics", admin.metrics, "Metrics for Prometheus"),
    _get("/model_info", admin.model_info, "Facts about the model"),
    _get("/get_model_info", admin.model_info, "Facts about the model"),
    _get("/server_info", admin.server_info, "Settings and state"),
    _get("/get_server_info", admin.server_info, "Settings and state"),
    _get("/v1/loads", admin.loads, "How busy the engine is"),
    _post("/flush_cache", admin.flush_cache, "Empty the prefix cache", access="admin"),
    _post("/abort_request", admin.abort_request, "Abort requests", body=admin.AbortRequest, access="admin"),
    _post("/set_policy", policy.set_policy, "Switch the policy", body=policy.PolicyRequest, access="admin"),
    _post("/freeze_gc", admin.freeze_gc, "Freeze the engine's garbage collector", access="admin"),
    _get("/requests", insight.list_requests, "The queue and the open requests", access="admin"),
    _get("/requests/{rid:path}", insight.explain_request, "What happened to a request, and why", access="admin"),
    _post("/audit", insight.audit, "Check who owns each page of KV memory", access="admin"),
    _get("/", health.hello, "Hello"),
)


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    config: ServerConfig,
    info: ServerInfo,
    readiness: Readiness,
) -> ASGIApp:
    """The application that serves one engine.

    Raises `TemplateError` or `OSError` if the chat template of `config` cannot be used.
    """
    front = Front(
        client=client,
        tokenizer=tokenizer,
        template=load_template(tokenizer, config),
        config=config,
        info=info,
        readiness=readiness,
    )
    operations = (*OPERATIONS, _openapi(info.version))
    router = Starlette(
        routes=[Route(one.path, Endpoint(front, one.handler), methods=[one.method]) for one in operations],
        exception_handlers={HTTPException: _http_error},
    )
    router.router.redirect_slashes = False
    app: ASGIApp = Edge(router, Keys(config), client.metrics, _Routes(operations).find)
    origins = [origin.strip() for origin in config.cors_origins.split(",") if origin.strip()]
    if origins:
        app = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=["GET", "POST", "PUT"],
            allow_headers=["authorization", "content-type", "x-api-key", "x-request-id", "x-request-timeout-ms"],
            expose_headers=["x-request-id"],
        )
    return app


def load_template(tokenizer: Tokenizer, config: ServerConfig) -> ChatTemplate | None:
    """The template of the settings, else the model's own. A broken one of the model only takes the chat away."""
    if config.chat_template:
        source = Path(config.chat_template).read_text("utf-8")
        return ChatTemplate({"default": source}, tokenizer.special_tokens)
    if not tokenizer.chat_templates:
        return None
    try:
        return ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens)
    except TemplateError as exc:
        log.warning("no_chat_template", reason=exc)
        return None


class Endpoint:
    """Runs one handler, and turns whatever it raises into an answer."""

    def __init__(self, front: Front, handler: Handler) -> None:
        self._front = front
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._handler(self._front, Request(scope, receive))
        except ClientGone:
            return
        except Exception as exc:
            answer = error_response(exc)
        await answer(scope, receive, send)


class _Routes:
    """The template and the access of a path."""

    def __init__(self, operations: tuple[Operation, ...]) -> None:
        self._plain = {one.path: (one.path, one.access) for one in operations}
        self._prefixes = {one.path.partition("{")[0]: (one.path, one.access) for one in operations if "{" in one.path}

    def find(self, path: str) -> tuple[str, Access]:
        found = self._plain.get(path)
        if found is not None:
            return found
        for prefix, route in self._prefixes.items():
            if path.startswith(prefix):
                return route
        return "other", "user"


def _openapi(version: str) -> Operation:
    async def openapi(front: Front, request: Request) -> ASGIApp:
        return Response(document, media_type="application/json")

    operation = _get("/openapi.json", openapi, "This document")
    document = json_bytes(openapi_document((*OPERATIONS, operation), version))
    return operation


def _http_error(request: Request, exc: Exception) -> Response:
    return error_response(exc)

"""The HTTP application: the table of routes, and how a request gets from there to its handler and
back.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.client.client import EngineClient
from weft.config.keys import KeyDigests, read_keys
from weft.config.limits import Limits
from weft.config.server import ServerConfig
from weft.observe.log import EventLog
from weft.observe.survivable import is_survivable
from weft.server import aliases, health, infill, tokens
from weft.server.admin import facts, loads, sessions, settings, weights, work
from weft.server.anthropic import messages
from weft.server.anthropic import models as anthropic
from weft.server.auth import Access, Keys, Pages
from weft.server.body import json_bytes
from weft.server.context import Readiness, ServerContext, ServerInfo
from weft.server.errors import ClientGone, error_response
from weft.server.http.middleware import RequestMiddleware
from weft.server.ollama import routes as ollama
from weft.server.ollama.models import OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest
from weft.server.openai import chat, completions, models
from weft.server.openai.responses import routes as responses
from weft.server.openai.responses.models import ResponsesRequest
from weft.server.openapi import docs_page, openapi_document
from weft.server.operation import Handler, Operation, get, post
from weft.server.pooling import classify, embeddings, scores
from weft.server.pooling import models as pooled
from weft.server.sglang import generate as native
from weft.server.sglang import parsing
from weft.text.parsers.formats import find_formats
from weft.text.templates.chat_template import TemplateError
from weft.text.templates.renderer import Renderer
from weft.text.tokenizer import Tokenizer

log = EventLog("server")

OPERATIONS = (
    post(
        *("/v1/chat/completions", chat.chat_completions, "Continue a conversation"),
        body=models.ChatRequest,
        answer=models.ChatCompletion,
    ),
    post(
        *(
            "/v1/chat/completions/input_tokens",
            chat.input_tokens,
            "Count the tokens of a conversation",
        ),
        body=models.ChatRequest,
        answer=models.InputTokens,
    ),
    post(
        *("/v1/completions", completions.completions, "Continue texts or token ids"),
        body=models.CompletionRequest,
        answer=models.TextCompletion,
    ),
    post(
        "/v1/messages",
        messages.messages,
        "Continue a conversation (Anthropic)",
        body=anthropic.MessagesRequest,
    ),
    post(
        *(
            "/v1/messages/count_tokens",
            messages.count_tokens,
            "Count the tokens of a conversation (Anthropic)",
        ),
        body=anthropic.CountRequest,
        answer=anthropic.TokenCount,
    ),
    post("/v1/responses", responses.create, "Create a response", body=ResponsesRequest),
    post(
        *(
            "/v1/responses/input_tokens",
            responses.input_tokens,
            "Count the tokens of a response's prompt",
        ),
        body=ResponsesRequest,
        answer=models.InputTokens,
    ),
    get("/v1/responses/{id}", responses.retrieve, "A stored response"),
    get(
        *(
            "/v1/responses/{id}/input_items",
            responses.list_input_items,
            "The input of a stored response",
        ),
        query=("limit",),
    ),
    Operation(
        method="DELETE",
        path="/v1/responses/{id}",
        handler=responses.delete,
        summary="Forget a stored response",
    ),
    post("/v1/responses/{id}/cancel", responses.cancel, "Cancel a background response"),
    post("/v1/embeddings", embeddings.embeddings, "Vectors of texts", body=pooled.EmbeddingRequest),
    *(
        post(path, scores.rerank, "Order documents by a query", body=pooled.RerankRequest)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank", "/reranking")
    ),
    *(
        post(path, scores.score, "Score pairs of texts, or label tokens", body=pooled.ScoreRequest)
        for path in ("/v1/score", "/score")
    ),
    *(
        post(path, classify.classify, "The labels of texts", body=pooled.ClassifyRequest)
        for path in ("/v1/classify", "/classify")
    ),
    post("/encode", embeddings.encode, "Vectors of texts (SGLang)", body=pooled.EncodeRequest),
    post(
        "/api/embed",
        embeddings.ollama_embed,
        "Vectors of texts (Ollama)",
        body=pooled.OllamaEmbedRequest,
    ),
    post(
        *("/api/embeddings", embeddings.ollama_embeddings, "The vector of a text (Ollama, older)"),
        body=pooled.OllamaEmbeddingsRequest,
    ),
    post(
        "/infill",
        infill.infill,
        "Fill the gap between two texts (llama.cpp)",
        body=infill.InfillRequest,
    ),
    post("/api/chat", ollama.chat, "Continue a conversation (Ollama)", body=OllamaChatRequest),
    post("/api/generate", ollama.generate, "Continue a text (Ollama)", body=OllamaGenerateRequest),
    get("/api/tags", ollama.tags, "The model that is served (Ollama)"),
    get("/api/ps", ollama.ps, "The model that is loaded (Ollama)"),
    post("/api/show", ollama.show, "Facts about the model (Ollama)", body=OllamaShowRequest),
    get("/api/version", ollama.version, "Version of weft (Ollama)"),
    post(
        "/generate",
        native.generate,
        "Continue texts or token ids (SGLang)",
        body=native.SglangGenerateRequest,
    ),
    Operation(
        method="PUT",
        path="/generate",
        handler=native.generate,
        summary="The same as POST",
        body=native.SglangGenerateRequest,
    ),
    post(
        "/tokenize", tokens.tokenize, "Text or messages to token ids", body=tokens.TokenizeRequest
    ),
    post(
        "/v1/tokenize",
        tokens.tokenize,
        "Text or messages to token ids",
        body=tokens.TokenizeRequest,
    ),
    post("/detokenize", tokens.detokenize, "Token ids to text", body=tokens.DetokenizeRequest),
    post("/v1/detokenize", tokens.detokenize, "Token ids to text", body=tokens.DetokenizeRequest),
    post(
        *("/apply-template", tokens.apply_template, "The prompt of a chat as text (llama.cpp)"),
        body=tokens.TemplateRequest,
    ),
    post(
        *(
            "/parse_function_call",
            parsing.parse_function_call,
            "Find the tool calls in a text (SGLang)",
        ),
        body=parsing.ParseCallsBody,
    ),
    post(
        *(
            "/separate_reasoning",
            parsing.separate_reasoning,
            "Find the reasoning in a text (SGLang)",
        ),
        body=parsing.SeparateBody,
    ),
    get("/tokenizer_info", tokens.tokenizer_info, "Special tokens and chat template"),
    get("/health", health.health, "Is the engine there?", access="open"),
    get("/ping", health.health, "The same as /health (SageMaker)", access="open"),
    get("/ready", health.ready, "Is new work accepted?", access="open"),
    get("/health_generate", health.health_generate, "Generate one token"),
    get("/version", health.version, "Version of weft"),
    *facts.ROUTES,
    *loads.ROUTES,
    *sessions.ROUTES,
    *work.ROUTES,
    *settings.ROUTES,
    *weights.ROUTES,
    *aliases.ROUTES,
    get("/", health.hello, "Hello"),
)


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    config: ServerConfig,
    info: ServerInfo,
    readiness: Readiness,
    limits: Limits | None = None,
    digests: KeyDigests | None = None,
) -> ASGIApp:
    """The application that serves one engine. The keys are those of `config` unless they are given.

    Raises `TemplateError` or `OSError` if the chat template of `config` cannot be used.
    """
    limits = limits or Limits()
    if digests is None:
        digests, config = read_keys(config)
    context = ServerContext(
        client=client,
        tokenizer=tokenizer,
        template=load_template(tokenizer, config),
        config=config,
        info=info,
        readiness=readiness,
        limits=limits,
        infill=tokenizer.infill,
        formats=find_formats(
            config.tool_call_parser, config.reasoning_parser, load_sources(tokenizer, config)
        ),
    )
    operations = (*OPERATIONS, *_documents(info.version))
    routes = Routes(
        Route(one.path, Endpoint(context, one.handler), methods=[one.method]) for one in operations
    )
    origins = _words(config.cors_origins)
    pages = Pages(origins=origins, hosts=_words(config.allowed_hosts), bound=config.host)
    keys = Keys(digests, pages, open_metrics=config.open_metrics)
    app: ASGIApp = RequestMiddleware(routes, keys, client.metrics, limits, _Routes(operations).find)
    if origins:
        app = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=[
                "authorization",
                "content-type",
                "x-api-key",
                "x-request-id",
                "x-request-timeout-ms",
            ],
            expose_headers=["x-request-id"],
        )
    return app


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def load_sources(tokenizer: Tokenizer, config: ServerConfig) -> list[str]:
    """The sources of the chat templates in use. Raises `OSError`."""
    if config.chat_template:
        return [Path(config.chat_template).read_text("utf-8")]
    return list(tokenizer.chat_templates.values())


def load_template(tokenizer: Tokenizer, config: ServerConfig) -> Renderer | None:
    """The template of the settings, else the model's own.

    A broken one of the model only takes the chat away.
    """
    if config.chat_template:
        [source] = load_sources(tokenizer, config)
        return Renderer({"default": source}, tokenizer.special_tokens)
    if not tokenizer.chat_templates:
        return None
    try:
        return Renderer(tokenizer.chat_templates, tokenizer.special_tokens)
    except TemplateError as exc:
        log.warning("no_chat_template", reason=exc)
        return None


class Routes:
    """Finds the handler of a path.

    Starlette's application is not around it: each piece of an answer would have to pass through it.
    `Endpoint` deals with what handlers raise, and the edge with what is raised here.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self._router = Router(list(routes), redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # so that unknown paths and methods raise
        await self._router(scope, receive, send)


class Endpoint:
    """Runs one handler, and turns whatever it raises into an answer."""

    def __init__(self, context: ServerContext, handler: Handler) -> None:
        self._context = context
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["weft.writers"] = self._context.writers  # for `Answer`
        try:
            answer = await self._handler(self._context, Request(scope, receive))
        except ClientGone:
            return
        except BaseException as exc:
            if not is_survivable(exc):
                raise
            answer = error_response(exc)
        await answer(scope, receive, send)


class _Routes:
    """The template and the access of a path."""

    def __init__(self, operations: tuple[Operation, ...]) -> None:
        self._plain = {one.path: (one.path, one.access) for one in operations}
        self._prefixes = {
            one.path.partition("{")[0]: (one.path, one.access)
            for one in operations
            if "{" in one.path
        }

    def find(self, path: str) -> tuple[str, Access]:
        found = self._plain.get(path)
        if found is not None:
            return found
        for prefix, route in self._prefixes.items():
            if path.startswith(prefix):
                return route
        return "other", "user"


def _documents(version: str) -> tuple[Operation, Operation]:
    """The routes that tell of all routes, themselves among them."""

    async def openapi(context: ServerContext, request: Request) -> ASGIApp:
        return Response(document, media_type="application/json")

    async def docs(context: ServerContext, request: Request) -> ASGIApp:
        return HTMLResponse(
            page,
            headers={"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"},
        )

    both = (
        get("/openapi.json", openapi, "This document"),
        get("/docs", docs, "All routes as a page"),
    )
    document = json_bytes(openapi_document((*OPERATIONS, *both), version))
    page = docs_page((*OPERATIONS, *both), version)
    return both

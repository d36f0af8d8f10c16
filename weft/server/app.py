"""The HTTP application: the table of routes, and how a request gets from there to its handler and back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
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
from weft.server.admin import flow, insight, loads, policy, profile, sessions, weights
from weft.server.admin import routes as admin
from weft.server.admin import settings as control
from weft.server.anthropic import messages
from weft.server.anthropic import models as anthropic
from weft.server.auth import Access, Keys
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
from weft.server.pages import Pages
from weft.server.pooling import classify, embeddings, scores
from weft.server.pooling import models as pooled
from weft.server.sglang import generate as native
from weft.server.sglang import parsing
from weft.text.parsers.formats import find_formats
from weft.text.templates.chat_template import TemplateError
from weft.text.templates.renderer import Renderer
from weft.text.tokenizer import Tokenizer

log = EventLog("server")

Handler = Callable[[ServerContext, Request], Awaitable[ASGIApp]]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One route."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    query: tuple[str, ...] = ()  # numbers behind the path, which stand in the table of ranges
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
        *(
            "/v1/chat/completions/input_tokens",
            chat.input_tokens,
            "Count the tokens of a conversation",
        ),
        body=models.ChatRequest,
        answer=models.InputTokens,
    ),
    _post(
        *("/v1/completions", completions.completions, "Continue texts or token ids"),
        body=models.CompletionRequest,
        answer=models.TextCompletion,
    ),
    _post(
        "/v1/messages",
        messages.messages,
        "Continue a conversation (Anthropic)",
        body=anthropic.MessagesRequest,
    ),
    _post(
        *(
            "/v1/messages/count_tokens",
            messages.count_tokens,
            "Count the tokens of a conversation (Anthropic)",
        ),
        body=anthropic.CountRequest,
        answer=anthropic.TokenCount,
    ),
    _post("/v1/responses", responses.create, "Create a response", body=ResponsesRequest),
    _post(
        *(
            "/v1/responses/input_tokens",
            responses.input_tokens,
            "Count the tokens of a response's prompt",
        ),
        body=ResponsesRequest,
        answer=models.InputTokens,
    ),
    _get("/v1/responses/{id}", responses.retrieve, "A stored response"),
    _get(
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
    _post("/v1/responses/{id}/cancel", responses.cancel, "Cancel a background response"),
    _post(
        "/v1/embeddings", embeddings.embeddings, "Vectors of texts", body=pooled.EmbeddingRequest
    ),
    *(
        _post(path, scores.rerank, "Order documents by a query", body=pooled.RerankRequest)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank", "/reranking")
    ),
    *(
        _post(path, scores.score, "Score pairs of texts, or label tokens", body=pooled.ScoreRequest)
        for path in ("/v1/score", "/score")
    ),
    *(
        _post(path, classify.classify, "The labels of texts", body=pooled.ClassifyRequest)
        for path in ("/v1/classify", "/classify")
    ),
    _post("/encode", embeddings.encode, "Vectors of texts (SGLang)", body=pooled.EncodeRequest),
    _post(
        "/api/embed",
        embeddings.ollama_embed,
        "Vectors of texts (Ollama)",
        body=pooled.OllamaEmbedRequest,
    ),
    _post(
        *("/api/embeddings", embeddings.ollama_embeddings, "The vector of a text (Ollama, older)"),
        body=pooled.OllamaEmbeddingsRequest,
    ),
    _post(
        "/infill",
        infill.infill,
        "Fill the gap between two texts (llama.cpp)",
        body=infill.InfillRequest,
    ),
    _post("/api/chat", ollama.chat, "Continue a conversation (Ollama)", body=OllamaChatRequest),
    _post("/api/generate", ollama.generate, "Continue a text (Ollama)", body=OllamaGenerateRequest),
    _get("/api/tags", ollama.tags, "The model that is served (Ollama)"),
    _get("/api/ps", ollama.ps, "The model that is loaded (Ollama)"),
    _post("/api/show", ollama.show, "Facts about the model (Ollama)", body=OllamaShowRequest),
    _get("/api/version", ollama.version, "Version of weft (Ollama)"),
    _get("/v1/models", admin.models, "The model that is served", answer=models.ModelList),
    _get("/v1/models/{id:path}", admin.model, "One model", answer=models.ModelCard),
    _post(
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
    _post(
        "/open_session",
        sessions.open_session,
        "Open a session (SGLang)",
        body=sessions.OpenSessionBody,
    ),
    _post(
        "/close_session",
        sessions.close_session,
        "Close a session (SGLang)",
        body=sessions.CloseSessionBody,
    ),
    _post(
        "/tokenize", tokens.tokenize, "Text or messages to token ids", body=tokens.TokenizeRequest
    ),
    _post(
        "/v1/tokenize",
        tokens.tokenize,
        "Text or messages to token ids",
        body=tokens.TokenizeRequest,
    ),
    _post("/detokenize", tokens.detokenize, "Token ids to text", body=tokens.DetokenizeRequest),
    _post("/v1/detokenize", tokens.detokenize, "Token ids to text", body=tokens.DetokenizeRequest),
    _post(
        *("/apply-template", tokens.apply_template, "The prompt of a chat as text (llama.cpp)"),
        body=tokens.TemplateRequest,
    ),
    _post(
        *(
            "/parse_function_call",
            parsing.parse_function_call,
            "Find the tool calls in a text (SGLang)",
        ),
        body=parsing.ParseCallsBody,
    ),
    _post(
        *(
            "/separate_reasoning",
            parsing.separate_reasoning,
            "Find the reasoning in a text (SGLang)",
        ),
        body=parsing.SeparateBody,
    ),
    _post(
        "/invocations",
        aliases.invocations,
        "Chat or text completion, by its fields (SageMaker)",
        body=aliases.Invocation,
    ),
    _get("/tokenizer_info", tokens.tokenizer_info, "Special tokens and chat template"),
    _get("/health", health.health, "Is the engine there?", access="open"),
    _get("/ping", health.health, "The same as /health (SageMaker)", access="open"),
    _get("/ready", health.ready, "Is new work accepted?", access="open"),
    _get("/health_generate", health.health_generate, "Generate one token"),
    _get("/version", health.version, "Version of weft"),
    _get("/metrics", admin.metrics, "Metrics for Prometheus", access="metrics"),
    _get("/model_info", admin.model_info, "Facts about the model"),
    _get("/get_model_info", admin.model_info, "Facts about the model"),
    _get("/server_info", admin.server_info, "Settings and state"),
    _get("/get_server_info", admin.server_info, "Settings and state"),
    _get("/v1/loads", loads.loads, "How busy the engine is", query=("dp_rank",)),
    _get("/get_load", loads.get_load, "How busy the engine is, in short"),
    _get("/load", aliases.load, "How many completions are open (vLLM)"),
    _post(
        "/flush_cache",
        admin.flush_cache,
        "Empty the prefix cache",
        query=("timeout",),
        access="admin",
    ),
    _post(
        "/reset_prefix_cache",
        admin.flush_cache,
        "The same (vLLM)",
        query=("timeout",),
        access="admin",
    ),
    _post(
        *("/abort_requests", aliases.abort_requests, "Abort requests, all if none is named (vLLM)"),
        body=aliases.AbortManyRequest,
        access="admin",
    ),
    _post(
        "/abort_request",
        admin.abort_request,
        "Abort requests",
        body=admin.AbortRequest,
        access="admin",
    ),
    _post(
        "/set_policy",
        policy.set_policy,
        "Switch the policy",
        body=policy.PolicyRequest,
        access="admin",
    ),
    _post("/freeze_gc", admin.freeze_gc, "Freeze the garbage collectors", access="admin"),
    _post(
        "/slow_down",
        control.slow_down,
        "Let steps take longer",
        body=control.SlowDownRequest,
        access="admin",
    ),
    _get(
        "/get_internal_state",
        control.get_internal_state,
        "Settings that can be changed",
        access="admin",
    ),
    _post(
        *("/set_internal_state", control.set_internal_state, "Change settings while running"),
        body=control.StateRequest,
        access="admin",
    ),
    _post(
        *("/configure_logging", control.configure_logging, "Change what is logged"),
        body=control.LoggingRequest,
        access="admin",
    ),
    _post(
        "/start_profile",
        profile.start_profile,
        "Record the next steps",
        body=profile.ProfileRequest,
        access="admin",
    ),
    _post(
        "/stop_profile",
        profile.stop_profile,
        "Stop recording, for a table and a trace",
        access="admin",
    ),
    _post(
        *(
            "/update_weights_from_disk",
            weights.update_weights_from_disk,
            "Load other weights from a folder",
        ),
        body=weights.FromDisk,
        access="admin",
    ),
    _post(
        *(
            "/update_weights_from_tensor",
            weights.update_weights_from_tensor,
            "Replace some weights",
        ),
        body=weights.FromTensor,
        access="admin",
    ),
    _post(
        *(
            "/update_weights_from_distributed",
            weights.update_weights_from_distributed,
            "Receive some weights",
        ),
        body=weights.FromDistributed,
        access="admin",
    ),
    _post(
        *(
            "/init_weights_update_group",
            weights.init_weights_update_group,
            "Join a group that weights come from",
        ),
        body=weights.InitGroup,
        access="admin",
    ),
    _post(
        *(
            "/destroy_weights_update_group",
            weights.destroy_weights_update_group,
            "Leave such a group",
        ),
        body=weights.DestroyGroup,
        access="admin",
    ),
    _post(
        *("/get_weights_by_name", weights.get_weights_by_name, "The first rows of a weight"),
        body=weights.ByName,
        access="admin",
    ),
    _post(
        *(
            "/release_memory_occupation",
            weights.release_memory_occupation,
            "Give memory back to the system",
        ),
        body=weights.Tags,
        access="admin",
    ),
    _post(
        *("/resume_memory_occupation", weights.resume_memory_occupation, "Use that memory again"),
        body=weights.Tags,
        access="admin",
    ),
    _get(
        "/requests",
        insight.list_requests,
        "The queue and the open requests",
        query=("limit",),
        access="admin",
    ),
    _get(
        "/requests/{rid:path}",
        insight.explain_request,
        "What happened to a request, and why",
        access="admin",
    ),
    _post("/audit", insight.audit, "Check who owns each page of KV memory", access="admin"),
    _post("/block", flow.block, "Hold back new requests", access="admin"),
    _post("/unblock", flow.unblock, "Let requests in again", access="admin"),
    _post(
        "/pause_generation",
        flow.pause_generation,
        "Run no step",
        body=flow.PauseRequest,
        access="admin",
    ),
    _post("/continue_generation", flow.continue_generation, "Go on after a pause", access="admin"),
    _post(
        "/rpc",
        flow.rpc,
        "Call a method of the engine by name",
        body=flow.RpcRequest,
        access="admin",
    ),
    _get("/", health.hello, "Hello"),
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
    """The template of the settings, else the model's own. A broken one of the model only takes the chat away."""
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
    """Finds the handler of a path. Starlette's application is not around it: each piece of an answer would have to pass
    through it. `Endpoint` deals with what handlers raise, and the edge with what is raised here."""

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
        _get("/openapi.json", openapi, "This document"),
        _get("/docs", docs, "All routes as a page"),
    )
    document = json_bytes(openapi_document((*OPERATIONS, *both), version))
    page = docs_page((*OPERATIONS, *both), version)
    return both

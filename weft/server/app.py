"""The HTTP application: all routes, and the way of a request to its handler and back.

Each module that answers requests has a table `ROUTES`; this module joins the tables. It does not
know what a route does.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.batches.service import BatchService
from weft.client.adapters import AdapterLoader, AdapterNames
from weft.client.client import EngineClient
from weft.client.feed import Feed
from weft.config.handoff import PREFILL
from weft.config.keys import KeyDigests, read_keys
from weft.config.limits import Limits
from weft.config.server import ServerConfig
from weft.observe.log import EventLog
from weft.observe.survivable import is_survivable
from weft.server import adapters as adapter_routes
from weft.server import aliases, health, infill, tokens
from weft.server.admin import (
    cache,
    facts,
    loads,
    models,
    pins,
    prefixes,
    sessions,
    settings,
    state,
    weights,
    work,
)
from weft.server.anthropic import batches as message_batches
from weft.server.anthropic import messages
from weft.server.auth import Access, Keys, Pages
from weft.server.body import json_bytes
from weft.server.catalog import ModelCatalog
from weft.server.context import Readiness, ServerContext, ServerInfo
from weft.server.errors import ClientGone, error_response
from weft.server.fields.engine import HEADER, want_engine_of_header
from weft.server.helpers import ModelHelpers, load_sources, start_helpers
from weft.server.http.handoff import WithTransferParams
from weft.server.http.inner_call import InnerCall
from weft.server.http.middleware import EdgeMetrics, RequestMiddleware
from weft.server.leaving import receiver
from weft.server.ollama import library
from weft.server.ollama import routes as ollama
from weft.server.openai import batches, chat, completions, files
from weft.server.openai.audio import routes as audio
from weft.server.openai.responses import routes as responses
from weft.server.openapi import docs_page, openapi_document
from weft.server.operation import Handler, Operation, get, with_known_query
from weft.server.page import routes as page
from weft.server.plugins import outside_operations
from weft.server.pooling import classify, embeddings, scores
from weft.server.refusals import RefusalLog
from weft.server.response_store import ResponseStore
from weft.server.session_store import SessionStore
from weft.server.sglang import generate, parsing
from weft.state.store import StateStore
from weft.text.media.families import ProcessorRecipe
from weft.text.parsers.formats import find_formats
from weft.text.tokenizer import Tokenizer
from weft.text.turns import Workers

# A finished answer is not thrown away because other answers are written first.
WRITER_WAIT_S = 600.0

log = EventLog("server")

OPERATIONS = (
    *chat.ROUTES,
    *completions.ROUTES,
    *audio.ROUTES,
    *messages.ROUTES,
    *responses.ROUTES,
    *files.ROUTES,
    *batches.ROUTES,
    *message_batches.ROUTES,
    *embeddings.ROUTES,
    *scores.ROUTES,
    *classify.ROUTES,
    *infill.ROUTES,
    *ollama.ROUTES,
    *library.ROUTES,
    *generate.ROUTES,
    *parsing.ROUTES,
    *tokens.ROUTES,
    *health.ROUTES,
    *facts.ROUTES,
    *loads.ROUTES,
    *models.ROUTES,
    *sessions.ROUTES,
    *state.ROUTES,
    *work.ROUTES,
    *cache.ROUTES,
    *pins.ROUTES,
    *prefixes.ROUTES,
    *settings.ROUTES,
    *weights.ROUTES,
    *adapter_routes.ROUTES,
    *aliases.ROUTES,
    *page.ROUTES,
)


def _make_readers() -> Workers:
    return Workers(2, "the reader of bodies")


def _make_writers() -> Workers:
    return Workers(2, "the writer of answers", wait_s=WRITER_WAIT_S)


@dataclass(frozen=True, kw_only=True)
class SharedParts:
    """What the models of one server have in common."""

    responses: ResponseStore
    state: StateStore | None  # None: nothing outlives the server
    batches: BatchService
    refusals: RefusalLog
    catalog: ModelCatalog | None = None  # the models on this machine
    model_name: str = ""  # whose sessions are stored, on a server with several
    readers: Workers = field(default_factory=_make_readers)
    writers: Workers = field(default_factory=_make_writers)


def shared_parts(
    config: ServerConfig,
    readiness: Readiness,
    limits: Limits,
    catalog: ModelCatalog | None = None,
) -> SharedParts:
    """Open the stores of a server; they close at the end of `readiness`. Raises StateError."""
    state = _open_state(config.state_dir, readiness)
    responses = ResponseStore(state=state)
    readiness.at_end(responses.close)
    service = BatchService(limits, state)
    readiness.at_ready(service.go_on)
    readiness.at_drain(service.stop)
    readiness.at_end(service.close)
    return SharedParts(
        responses=responses,
        state=state,
        batches=service,
        refusals=RefusalLog(),
        catalog=catalog,
    )


class ModelApp(NamedTuple):
    """The routes of one model, and what their handlers use."""

    context: ServerContext
    routes: ASGIApp  # without the middleware
    operations: tuple[Operation, ...]


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    config: ServerConfig,
    info: ServerInfo,
    readiness: Readiness,
    limits: Limits | None = None,
    digests: KeyDigests | None = None,
    adapters: AdapterNames | None = None,
    processor: ProcessorRecipe | None = None,
    plugins: str = "",
    catalog: ModelCatalog | None = None,
) -> ASGIApp:
    """The application that serves one engine.

    `digests` defaults to the keys of `config`. Without `adapters`, the server has none and loads
    none; without a `processor`, the model takes only text. `plugins`: the value of `--plugins`;
    `catalog`: the models on this machine, for Ollama's routes that change them.

    Raises `TemplateError` or `OSError` if the chat template of `config` cannot be used, and
    SettingsError or UnsupportedModel if the settings or the model do not allow images, and
    StateError if the state folder cannot be used.
    """
    limits = limits or Limits()
    if digests is None:
        digests, config = read_keys(config)
    served = model_app(
        client,
        tokenizer,
        config,
        info,
        readiness,
        limits,
        adapters,
        start_helpers(tokenizer, config, limits, processor),
        plugins,
        shared=shared_parts(config, readiness, limits, catalog),
        has_keys=bool(digests.user or digests.admin),
    )
    return with_edge(
        served.routes,
        served.operations,
        config,
        limits,
        digests,
        client.metrics,
        served.context.refusals,
        served.context.batches,
    )


def model_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    config: ServerConfig,
    info: ServerInfo,
    readiness: Readiness,
    limits: Limits,
    adapters: AdapterNames | None,
    helpers: ModelHelpers,
    plugins: str,
    *,
    shared: SharedParts,
    has_keys: bool,
) -> ModelApp:
    """The routes of one model; see `create_app`. `helpers` close at the end of `readiness`."""
    sources = load_sources(tokenizer, config)
    adapters = adapters or AdapterNames()
    context = ServerContext(
        feed=Feed(client, tokenizer, lambda: readiness.draining),
        readers=shared.readers,
        writers=shared.writers,
        has_keys=has_keys,
        client=client,
        tokenizer=tokenizer,
        template=helpers.template,
        config=config,
        info=info,
        readiness=readiness,
        adapters=adapters,
        loader=AdapterLoader(adapters, client),
        media=helpers.media,
        limits=limits,
        responses=shared.responses,
        refusals=shared.refusals,
        catalog=shared.catalog,
        state=shared.state,
        batches=shared.batches,
        sessions=_kept_sessions(client, tokenizer, shared),
        infill=tokenizer.infill,
        formats=find_formats(config.tool_call_parser, config.reasoning_parser, sources),
    )
    if context.media is not None:
        readiness.at_drain(context.media.close)
    readiness.at_end(helpers.close)
    own = outside_operations(plugins, (*OPERATIONS, *_documents(info.version, ())))
    operations = (*OPERATIONS, *own, *_documents(info.version, own))
    routes: list[Route] = []
    for path, by_method in grouped(operations).items():
        handlers = {method: with_known_query(one) for method, one in by_method.items()}
        routes.append(Route(path, Endpoint(context, handlers), methods=list(handlers)))
    # Not wrapped in Starlette's application, because each piece of an answer would pass through it.
    inner: ASGIApp = Router(routes, redirect_slashes=False)
    if info.settings.get("disaggregation_mode") == PREFILL:
        inner = WithTransferParams(inner)
    return ModelApp(context, inner, operations)


def with_edge(
    inner: ASGIApp,
    operations: Sequence[Operation],
    config: ServerConfig,
    limits: Limits,
    digests: KeyDigests,
    metrics: EdgeMetrics,
    refusals: RefusalLog,
    service: BatchService,
) -> ASGIApp:
    """`inner` inside of what every request passes: keys, limits of heads, counts, CORS."""
    service.answer_with(InnerCall(inner, refusals.note))
    origins = _words(config.cors_origins)
    pages = Pages(origins=origins, hosts=_words(config.allowed_hosts), bound=config.host)
    keys = Keys(digests, pages, open_metrics=config.open_metrics)
    app: ASGIApp = RequestMiddleware(
        inner,
        keys,
        metrics,
        limits,
        RouteTable(operations).find,
        refusals.note,
    )
    if origins:
        app = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=[
                "authorization",
                "content-type",
                "x-api-key",
                "api-key",
                "x-request-id",
                "x-request-timeout-ms",
            ],
            expose_headers=["x-request-id"],
        )
    return app


def _open_state(folder: str, readiness: Readiness) -> StateStore | None:
    """The state in this folder, until the end of the server; None without a folder."""
    if not folder:
        return None
    state = StateStore(Path(folder).expanduser())
    readiness.at_end(state.close)
    return state


def _kept_sessions(
    client: EngineClient, tokenizer: Tokenizer, shared: SharedParts
) -> SessionStore | None:
    """Let the client keep the sessions of its engine, if there is a store for them."""
    if shared.state is None:
        return None
    found = SessionStore(shared.state, tokenizer.digest, shared.model_name)
    client.session_keeper = found
    return found


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


class RouteOfPath(Protocol):
    """What says how a request is answered that has this method and this path."""

    @property
    def method(self) -> str: ...

    @property
    def path(self) -> str: ...


R = TypeVar("R", bound=RouteOfPath)


def grouped(routes: Iterable[R]) -> dict[str, dict[str, R]]:
    """The routes of each path, by method; GET's answers HEAD, too. One of Starlette's routes is
    made of each path, so that the refusal of a method names all that the path takes."""
    found: dict[str, dict[str, R]] = {}
    for one in routes:
        by_method = found.setdefault(one.path, {})
        by_method[one.method] = one
        if one.method == "GET":
            by_method["HEAD"] = one
    return found


class Endpoint:
    """Runs the handler of a method, and turns every exception into an answer."""

    def __init__(self, context: ServerContext, handlers: Mapping[str, Handler]) -> None:
        self._context = context
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["weft.writers"] = self._context.writers  # for `Answer`
        receiver.set(receive)
        request = Request(scope, receive)
        try:
            if HEADER in request.headers:
                want_engine_of_header(request.headers[HEADER], self._context.config.dp_size)
            answer = await self._handlers[request.method](self._context, request)
        except ClientGone as exc:
            scope["weft.error"] = str(exc)
            return
        except BaseException as exc:
            if not is_survivable(exc):
                raise
            answer = error_response(exc)
        await answer(scope, receive, send)


class RouteTable:
    """Finds the route template and the access of a path."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._plain: dict[str, tuple[str, Access]] = {}
        self._prefixes: dict[str, tuple[str, Access]] = {}
        for operation in operations:
            route = (operation.path, operation.access)
            prefix, brace, _ = operation.path.partition("{")
            self._plain[operation.path] = route
            if brace:
                self._prefixes[prefix] = route

    def find(self, path: str) -> tuple[str, Access]:
        """The template and the access; ("other", "user") for an unknown path."""
        found = self._plain.get(path)
        if found is not None:
            return found
        for prefix, route in self._prefixes.items():
            if path.startswith(prefix):
                return route
        return "other", "user"


def _documents(version: str, own: Sequence[Operation]) -> tuple[Operation, Operation]:
    """The routes that describe all routes, themselves and those from outside (`own`) included.

    The documents are generated at the first request, because that takes a good part of the time of
    a start.
    """

    @functools.cache
    def document(limits: Limits) -> bytes:
        return json_bytes(openapi_document((*OPERATIONS, *own, *both), version, limits))

    @functools.cache
    def page() -> str:
        return docs_page((*OPERATIONS, *own, *both), version)

    async def openapi(context: ServerContext, request: Request) -> ASGIApp:
        content = await asyncio.to_thread(document, context.limits)
        return Response(content, media_type="application/json")

    async def docs(context: ServerContext, request: Request) -> ASGIApp:
        policy = "default-src 'none'; style-src 'unsafe-inline'"
        content = await asyncio.to_thread(page)
        return HTMLResponse(content, headers={"content-security-policy": policy})

    both = (
        get("/openapi.json", openapi, "This document"),
        get("/docs", docs, "All routes as a page"),
    )
    return both

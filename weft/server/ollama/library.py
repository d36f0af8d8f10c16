"""Ollama's routes that change the models on the server's machine: pull, delete, copy. They need
access to administration: whoever may use them fills disks and removes files."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp

from weft.json_types import JsonObject
from weft.server.body import json_response, read_json
from weft.server.catalog import (
    CatalogError,
    ModelCatalog,
    NoSuchModel,
    OpenPulls,
    PullState,
)
from weft.server.context import ServerContext
from weft.server.errors import ApiError, ollama_error
from weft.server.ollama.models import OllamaCopyRequest, OllamaDeleteRequest, OllamaPullRequest
from weft.server.operation import Operation, post

T = TypeVar("T")

MAX_PULLS = 4  # at a time
NDJSON = "application/x-ndjson"
REPORT_S = 0.2  # between two lines of one pull


async def pull(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, OllamaPullRequest)
    name = required_name(body.target, "model")
    catalog = catalog_of(context)
    pulls = context.pulls
    if pulls.num >= MAX_PULLS:
        raise ApiError(429, f"{MAX_PULLS} models are being pulled, no more are allowed at a time")
    lines = _pulled(catalog, pulls, name)
    if body.stream is not False:
        return StreamingResponse(lines, media_type=NDJSON)
    async for line in lines:
        last = line
    if b'"error"' in last:
        return Response(last, status_code=400, media_type="application/json")
    return Response(last, media_type="application/json")


async def _pulled(catalog: ModelCatalog, pulls: OpenPulls, name: str) -> AsyncIterator[bytes]:
    """The lines of a pull. It stops, and keeps what has come, if nobody reads them any more."""
    loop = asyncio.get_running_loop()
    states: asyncio.Queue[PullState | None] = asyncio.Queue()
    stopped = threading.Event()

    def report(state: PullState | None) -> None:
        loop.call_soon_threadsafe(states.put_nowait, state)

    def run() -> None:
        try:
            catalog.pull(name, report, stopped)
        finally:
            report(None)  # from this thread, so that it comes after all states

    pulls.num += 1
    running = asyncio.create_task(asyncio.to_thread(run))
    try:
        yield _line({"status": "pulling manifest"})
        while True:
            state = await states.get()
            if state is None:
                break
            while not states.empty():  # a slow reader gets the newest
                newer = states.get_nowait()
                if newer is None:
                    states.put_nowait(None)
                    break
                state = newer
            yield _line(_shown(state))
            await asyncio.sleep(REPORT_S)
        try:
            await running
        except CatalogError as exc:
            yield ollama_error(ApiError(400, str(exc))) + b"\n"
            return
        yield _line({"status": "success"})
    finally:
        stopped.set()
        pulls.num -= 1


async def delete(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, OllamaDeleteRequest)
    await remove_files(context, required_name(body.target, "model"))
    return json_response({})


async def remove_files(context: ServerContext, name: str) -> None:
    """Remove a model from this machine. Raises ApiError."""
    await in_thread(lambda: catalog_of(context).delete(name))


async def copy(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, OllamaCopyRequest)
    source = required_name(body.source, "source")
    destination = required_name(body.destination, "destination")
    await in_thread(lambda: catalog_of(context).copy(source, destination))
    return json_response({})


def catalog_of(context: ServerContext) -> ModelCatalog:
    if context.catalog is None:
        raise ApiError(501, "this server was started without a store of models")
    return context.catalog


async def in_thread(work: Callable[[], T]) -> T:
    """What `work` returns. Raises ApiError for errors of the catalog."""
    try:
        return await asyncio.to_thread(work)
    except NoSuchModel as exc:
        raise ApiError(404, str(exc), param="model", code="model_not_found") from exc
    except CatalogError as exc:
        raise ApiError(400, str(exc), param="model") from exc


def required_name(name: str | None, param: str) -> str:
    if not name:
        raise ApiError(400, f"{param} must name a model", param=param)
    return name


def _shown(state: PullState) -> JsonObject:
    found: JsonObject = {"status": state.status}
    if state.digest:
        found |= {"digest": f"sha256:{state.digest}", "total": state.total_bytes}
        found["completed"] = state.done_bytes
    return found


def _line(fields: JsonObject) -> bytes:
    return msgspec.json.encode(fields) + b"\n"


ROUTES = (
    post("/api/pull", pull, "Fetch a model of the hub (Ollama)", OllamaPullRequest, access="admin"),
    post("/api/copy", copy, "Copy a model (Ollama)", OllamaCopyRequest, access="admin"),
    Operation(
        "DELETE",
        "/api/delete",
        delete,
        "Remove a model (Ollama)",
        OllamaDeleteRequest,
        access="admin",
    ),
)

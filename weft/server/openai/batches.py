"""`/v1/batches`: create, list, retrieve, cancel. A batch belongs to the key that created it."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.batches.forms.openai import OPENAI
from weft.batches.records import BatchRecord
from weft.batches.service import newest_first
from weft.config.numbers import shown
from weft.json_types import JsonObject
from weft.server.auth import owner_of
from weft.server.body import json_response, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.fields.paging import page_of
from weft.server.openai.files import found_file
from weft.server.operation import get, post

DEFAULT_LIMIT = 20
WINDOW = re.compile(r"([1-9][0-9]{0,3})([mhd])")
UNITS_S = {"m": 60, "h": 3_600, "d": 86_400}
MAX_METADATA = 16  # pairs
MAX_KEY_LEN = 64
MAX_VALUE_LEN = 512


class ExpiresAfter(msgspec.Struct, kw_only=True):
    seconds: int
    anchor: str = "created_at"


class BatchBody(msgspec.Struct, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class RequestCounts(msgspec.Struct, kw_only=True):
    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct, kw_only=True):
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    created_at: int
    expires_at: int
    request_counts: RequestCounts
    object: str = "batch"
    errors: JsonObject | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    metadata: JsonObject | None = None


class BatchList(msgspec.Struct, kw_only=True):
    data: list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


async def create(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, BatchBody)
    if body.endpoint not in OPENAI.paths:
        message = f"endpoint is {shown(body.endpoint)}; allowed: {', '.join(OPENAI.paths)}"
        raise ApiError(400, message, param="endpoint")
    window = WINDOW.fullmatch(body.completion_window)
    if window is None:
        message = f"completion_window is {shown(body.completion_window)}; as 24h, 90m or 7d"
        raise ApiError(400, message, param="completion_window")
    _check_metadata(body.metadata or {})
    results_expire_s = None
    if body.output_expires_after is not None:
        results_expire_s = float(body.output_expires_after.seconds)
    file = found_file(context, request, body.input_file_id, "input_file_id")
    if file.purpose != "batch":
        message = f"input_file_id is a file for {file.purpose}; one for batch is needed"
        raise ApiError(400, message, param="input_file_id")
    batch = await context.batches.add_batch(
        owner_of(request),
        OPENAI,
        body.endpoint,
        file,
        prefix="batch_",
        window=body.completion_window,
        window_s=int(window[1]) * UNITS_S[window[2]],
        metadata=dict(body.metadata or {}),
        results_expire_s=results_expire_s,
    )
    await context.batches.settled()
    return json_response(batch_object(batch))


async def list_batches(context: ServerContext, request: Request) -> ASGIApp:
    """The newest first; `?limit`, `?after` and `?order=asc` select."""
    batches = [one for one in context.batches.batches.values() if one.form == OPENAI.name]
    mine = newest_first(batches, owner_of(request))
    page = page_of(request, mine, lambda batch: batch.id, DEFAULT_LIMIT)
    return json_response(
        BatchList(
            data=[batch_object(one) for one in page.records],
            has_more=page.has_more,
            first_id=page.first_id,
            last_id=page.last_id,
        )
    )


async def retrieve(context: ServerContext, request: Request) -> ASGIApp:
    return json_response(batch_object(_found(context, request)))


async def cancel(context: ServerContext, request: Request) -> ASGIApp:
    """Lines without an answer get none; what was answered stays."""
    batch = _found(context, request)
    if not batch.is_open:
        raise ApiError(400, f"the batch is {batch.status}, and cannot be cancelled")
    context.batches.cancel(batch)
    await context.batches.settled()
    return json_response(batch_object(batch))


def batch_object(batch: BatchRecord) -> BatchObject:
    times: dict[str, Any] = {f"{name}_at": int(at_s) for name, at_s in batch.times.items()}
    times.pop("validating_at", None)
    errors = None
    if batch.failure:
        error = {"code": "batch_failed", "message": batch.failure, "line": None, "param": None}
        errors = {"object": "list", "data": [error]}
    return BatchObject(
        id=batch.id,
        endpoint=batch.path,
        input_file_id=batch.input_file,
        completion_window=batch.window,
        status=batch.status,
        created_at=int(batch.created_s),
        expires_at=int(batch.expires_s),
        request_counts=RequestCounts(
            total=batch.num_lines, completed=batch.num_completed, failed=batch.num_failed
        ),
        errors=errors,
        output_file_id=batch.output_file,
        error_file_id=batch.error_file,
        metadata=batch.metadata or None,
        **times,
    )


def _found(context: ServerContext, request: Request) -> BatchRecord:
    id = request.path_params["id"]
    batch = context.batches.batch_of(id, owner_of(request), OPENAI)
    if batch is None:
        raise ApiError(404, f"there is no batch {shown(id)}", param="batch_id")
    return batch


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        message = f"metadata has {len(metadata)} pairs; at most {MAX_METADATA} are allowed"
        raise ApiError(400, message, param="metadata")
    for key, value in metadata.items():
        if len(key) > MAX_KEY_LEN or len(value) > MAX_VALUE_LEN:
            message = (
                f"metadata has {shown(key)}; keys have at most {MAX_KEY_LEN} characters, and "
                f"values {MAX_VALUE_LEN}"
            )
            raise ApiError(400, message, param="metadata")


ROUTES = (
    post("/v1/batches", create, "Begin a batch", body=BatchBody, answer=BatchObject),
    get("/v1/batches", list_batches, "The batches of this key", answer=BatchList, query=("limit",)),
    get("/v1/batches/{id}", retrieve, "One batch", answer=BatchObject),
    post("/v1/batches/{id}/cancel", cancel, "Cancel a batch", answer=BatchObject),
)

"""`/v1/messages/batches`: create, list, retrieve, results, cancel, delete."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.types import ASGIApp

from weft.batches.forms.anthropic import ANTHROPIC, PATH, AnthropicLine
from weft.batches.records import BatchRecord
from weft.batches.service import newest_first
from weft.config.numbers import shown
from weft.server.auth import owner_of
from weft.server.body import json_response, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.fields.numbers import query_number
from weft.server.operation import delete, get, post

DEFAULT_LIMIT = 20
DAY_S = 86_400.0
STATUS = {"cancelling": "canceling", "validating": "in_progress", "in_progress": "in_progress"}


class MessageBatchBody(msgspec.Struct, kw_only=True):
    requests: list[AnthropicLine]


class MessageCounts(msgspec.Struct, kw_only=True):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(msgspec.Struct, kw_only=True):
    id: str
    processing_status: str
    request_counts: MessageCounts
    created_at: str
    expires_at: str
    type: str = "message_batch"
    ended_at: str | None = None
    archived_at: str | None = None
    cancel_initiated_at: str | None = None
    results_url: str | None = None


class MessageBatchList(msgspec.Struct, kw_only=True):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageBatchDeleted(msgspec.Struct, kw_only=True):
    id: str
    type: str = "message_batch_deleted"


async def create(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, MessageBatchBody)
    if not body.requests:
        raise ApiError(400, "requests is empty; at least one is needed", param="requests")
    service = context.batches
    owner = owner_of(request)
    service.files.require_room(owner)
    lines = io.BytesIO(b"".join(msgspec.json.encode(one) + b"\n" for one in body.requests))
    file = await service.files.store(lines, owner, "requests.jsonl", "batch")
    try:
        batch = await service.add_batch(
            owner,
            ANTHROPIC,
            PATH,
            file,
            prefix="msgbatch_",
            window="24h",
            window_s=DAY_S,
            metadata={},
        )
    except Exception:
        service.delete_file(file)
        raise
    await service.settled()
    return json_response(_object(request, batch))


async def list_batches(context: ServerContext, request: Request) -> ASGIApp:
    """The newest first; `?limit`, `?after_id` and `?before_id` select."""
    batches = [one for one in context.batches.batches.values() if one.form == ANTHROPIC.name]
    found = newest_first(batches, owner_of(request))
    ids = [one.id for one in found]
    limit = int(query_number(request, "limit", DEFAULT_LIMIT))
    after = request.query_params.get("after_id")
    before = request.query_params.get("before_id")
    for name, id in (("after_id", after), ("before_id", before)):
        if id is not None and id not in ids:
            raise ApiError(400, f"{name} is {shown(id)}, which is no batch here", param=name)
    if after is not None:
        found = found[ids.index(after) + 1 :]
    elif before is not None:
        found = found[: ids.index(before)]
    page = found[-limit:] if before is not None and after is None else found[:limit]
    return json_response(
        MessageBatchList(
            data=[_object(request, one) for one in page],
            has_more=len(page) < len(found),
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
        )
    )


async def retrieve(context: ServerContext, request: Request) -> ASGIApp:
    return json_response(_object(request, _found(context, request)))


async def results(context: ServerContext, request: Request) -> ASGIApp:
    """One line for each request, in the order in which they ended."""
    batch = _found(context, request)
    if batch.is_open:
        raise ApiError(404, "the batch has not ended yet; its results are there when it has")
    path = context.batches.results(batch)
    if path is None:
        raise ApiError(404, "the results of this batch are not there any more")
    return FileResponse(path, media_type="application/x-jsonl")


async def cancel(context: ServerContext, request: Request) -> ASGIApp:
    batch = _found(context, request)
    if not batch.is_open:
        raise ApiError(400, "the batch has ended, and cannot be cancelled")
    context.batches.cancel(batch)
    await context.batches.settled()
    return json_response(_object(request, batch))


async def remove(context: ServerContext, request: Request) -> ASGIApp:
    batch = _found(context, request)
    service = context.batches
    service.delete_batch(batch)
    for id in (batch.input_file, batch.output_file):
        file = None if id is None else service.files.file_of(id, batch.owner)
        if file is not None:
            service.delete_file(file)
    await service.settled()
    return json_response(MessageBatchDeleted(id=batch.id))


def _found(context: ServerContext, request: Request) -> BatchRecord:
    id = request.path_params["id"]
    batch = context.batches.batch_of(id, owner_of(request), ANTHROPIC)
    if batch is None:
        raise ApiError(404, f"there is no message batch {shown(id)}")
    return batch


def _object(request: Request, batch: BatchRecord) -> MessageBatch:
    num_errored = batch.num_failed - batch.num_cancelled - batch.num_expired
    num_ended = batch.num_completed + batch.num_failed
    ended_s = max(batch.times.values(), default=0.0)
    is_over = not batch.is_open
    url = None
    if is_over and batch.output_file is not None:
        url = f"{request.base_url}v1/messages/batches/{batch.id}/results"
    cancelled_s = batch.times.get("cancelling")
    return MessageBatch(
        id=batch.id,
        processing_status="ended" if is_over else STATUS.get(batch.status, "in_progress"),
        request_counts=MessageCounts(
            processing=0 if is_over else batch.num_lines - num_ended,
            succeeded=batch.num_completed,
            errored=num_errored,
            canceled=batch.num_cancelled,
            expired=batch.num_expired,
        ),
        created_at=_time(batch.created_s),
        expires_at=_time(batch.expires_s),
        ended_at=_time(ended_s) if is_over else None,
        cancel_initiated_at=None if cancelled_s is None else _time(cancelled_s),
        results_url=url,
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


ROUTES = (
    post(
        "/v1/messages/batches",
        create,
        "Begin a batch of messages",
        body=MessageBatchBody,
        answer=MessageBatch,
    ),
    get(
        "/v1/messages/batches",
        list_batches,
        "The message batches of this key",
        answer=MessageBatchList,
        query=("limit",),
    ),
    get("/v1/messages/batches/{id}", retrieve, "One message batch", answer=MessageBatch),
    get("/v1/messages/batches/{id}/results", results, "The results of a message batch"),
    post("/v1/messages/batches/{id}/cancel", cancel, "Cancel a message batch", answer=MessageBatch),
    delete("/v1/messages/batches/{id}", remove, "Delete a message batch that has ended"),
)

"""`/v1/files`: upload, list, retrieve, content, delete.

A file belongs to the key that uploaded it.
"""

from __future__ import annotations

import re

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.types import ASGIApp

from weft.batches.records import StoredFile
from weft.batches.service import newest_first
from weft.config.numbers import MAX_EXPIRY_S, MIN_EXPIRY_S, shown
from weft.server.auth import owner_of
from weft.server.body import json_response
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.fields.paging import page_of
from weft.server.openai.form import read_form
from weft.server.operation import delete, get, post

PURPOSES = ("batch", "user_data")
MAX_FIELDS = 8  # of the form, beside the file
MAX_DIGITS = 10
DEFAULT_LIMIT = 1_000  # files in one answer
UNSAFE = re.compile(r"[^\w.() -]")  # characters of a file's name


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    expires_at: int | None = None
    status: str = "processed"
    status_details: str | None = None


class FileList(msgspec.Struct, kw_only=True):
    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class FileDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: str = "file"
    deleted: bool = True


async def upload(context: ServerContext, request: Request) -> ASGIApp:
    service = context.batches
    owner = owner_of(request)
    service.files.require_room(owner)
    form = await read_form(
        request,
        most_mb=context.limits.max_file_mb,
        limit="max_file_mb",
        timeout_s=context.limits.body_timeout_s,
        max_fields=MAX_FIELDS,
    )
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise ApiError(400, "the form has no file; give it as the field file", param="file")
        purpose = form.get("purpose")
        if purpose not in PURPOSES:
            message = f"purpose is {shown(purpose)}; allowed: {', '.join(PURPOSES)}"
            raise ApiError(400, message, param="purpose")
        expires_after_s = _expiry(form)
        name = UNSAFE.sub("_", file.filename or "file.jsonl")[:200]
        stored = await service.files.store(file.file, owner, name, str(purpose), expires_after_s)
    finally:
        await form.close()
    await service.settled()
    return json_response(file_object(stored))


async def list_files(context: ServerContext, request: Request) -> ASGIApp:
    """The newest first; `?purpose`, `?limit`, `?after` and `?order=asc` select."""
    files = newest_first(context.batches.files.by_id.values(), owner_of(request))
    purpose = request.query_params.get("purpose")
    if purpose is not None:
        files = [one for one in files if one.purpose == purpose]
    page = page_of(request, files, lambda file: file.id, DEFAULT_LIMIT)
    return json_response(
        FileList(
            data=[file_object(one) for one in page.records],
            has_more=page.has_more,
            first_id=page.first_id,
            last_id=page.last_id,
        )
    )


async def retrieve(context: ServerContext, request: Request) -> ASGIApp:
    return json_response(file_object(found_file(context, request, request.path_params["id"])))


async def content(context: ServerContext, request: Request) -> ASGIApp:
    file = found_file(context, request, request.path_params["id"])
    path = context.batches.files.content_of(file)
    return FileResponse(path, media_type="application/octet-stream")


async def remove(context: ServerContext, request: Request) -> ASGIApp:
    file = found_file(context, request, request.path_params["id"])
    context.batches.delete_file(file)
    await context.batches.settled()
    return json_response(FileDeleted(id=file.id))


def found_file(
    context: ServerContext, request: Request, id: str, param: str = "file_id"
) -> StoredFile:
    """The file of this key with this id. Raises `ApiError` 404."""
    file = context.batches.files.file_of(id, owner_of(request))
    if file is None:
        raise ApiError(404, f"there is no file {shown(id)}", param=param)
    return file


def file_object(file: StoredFile) -> FileObject:
    return FileObject(
        id=file.id,
        bytes=file.num_bytes,
        created_at=int(file.created_s),
        filename=file.filename,
        purpose=file.purpose,
        expires_at=None if file.expires_s is None else int(file.expires_s),
    )


def _expiry(form: FormData) -> float | None:
    """Seconds from now until the file expires; None: never. Raises `ApiError`."""
    seconds = form.get("expires_after[seconds]")
    anchor = form.get("expires_after[anchor]", "created_at")
    if anchor != "created_at":
        message = f"expires_after[anchor] is {shown(anchor)}; created_at is allowed"
        raise ApiError(400, message, param="expires_after")
    if seconds is None:
        return None
    text = str(seconds)
    found = int(text) if text.isdecimal() and len(text) < MAX_DIGITS else -1
    if not MIN_EXPIRY_S <= found <= MAX_EXPIRY_S:
        message = (
            f"expires_after[seconds] is {shown(text)}; {MIN_EXPIRY_S:,} to {MAX_EXPIRY_S:,} are "
            "allowed"
        )
        raise ApiError(400, message, param="expires_after")
    return float(found)


ROUTES = (
    post("/v1/files", upload, "Upload a file, for a batch", answer=FileObject),
    get("/v1/files", list_files, "The files of this key", answer=FileList, query=("limit",)),
    get("/v1/files/{id}", retrieve, "One file", answer=FileObject),
    get("/v1/files/{id}/content", content, "The content of a file"),
    delete("/v1/files/{id}", remove, "Delete a file"),
)

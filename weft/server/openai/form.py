"""Bodies of `multipart/form-data`, with one file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from weft.server.errors import ApiError, ClientGone, over
from weft.server.http.form_texts import MAX_TEXT_LEN, is_form


async def read_form(
    request: Request, *, most_mb: float, limit: str, timeout_s: float, max_fields: int
) -> FormData:
    """The parts of the body; a large file is on disk. `most_mb`: the largest body, and `limit` its
    option. Raises `ApiError` and ClientGone."""
    if not is_form(request.headers.get("content-type", "")):
        raise ApiError(415, "the content type of the body must be multipart/form-data")
    parser = MultiPartParser(
        request.headers,
        _pieces(request, most_mb, limit),
        max_files=1,
        max_fields=max_fields,
        max_part_size=MAX_TEXT_LEN,
    )
    try:
        async with asyncio.timeout(max(timeout_s, most_mb)):
            return await parser.parse()
    except MultiPartException as exc:
        raise ApiError(400, f"the form cannot be read: {exc.message}") from exc
    except TimeoutError as exc:
        raise over("body_timeout_s", "the body did not arrive in time", status=408) from exc


async def _pieces(request: Request, most_mb: float, limit: str) -> AsyncGenerator[bytes, None]:
    """The body in pieces. Raises `ApiError` 413 when it gets longer than allowed."""
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone(f"when {size:,} bytes of the body had arrived")
        piece = message.get("body", b"")
        size += len(piece)
        if size > most_mb * 1_000_000:
            raise over(limit, f"the file is larger than the limit of {most_mb:g} MB", status=413)
        yield piece
        if not message.get("more_body", False):
            return

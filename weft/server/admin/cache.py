"""Routes about the cache: its content in memory and on disk, and clearing and saving its files."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from weft.client.calls import CALL_TIMEOUT_S
from weft.messages.by_name import plain
from weft.messages.cache import ClearCache, GetCache, SaveCache
from weft.messages.calls import SuccessReply
from weft.observe.log import EventLog
from weft.server.body import json_response
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.fields.numbers import query_number
from weft.server.operation import get, post

log = EventLog("admin")
DEFAULT_TIMEOUT_S = 10.0


async def get_cache(context: ServerContext, request: Request) -> ASGIApp:
    """Bytes and blocks in memory and on disk, and prompt tokens found in each."""
    return json_response(plain(await context.client.call(GetCache())))


async def clear_cache(context: ServerContext, request: Request) -> ASGIApp:
    """Remove all files of `--cache-dir`; 400 if the server has none."""
    return _done("clear_cache", await context.client.call(ClearCache()))


async def save_cache(context: ServerContext, request: Request) -> ASGIApp:
    """Write the content of the prefix cache to disk, for up to `?timeout` seconds; 400 without
    `--cache-dir`."""
    timeout_s = query_number(request, "timeout", DEFAULT_TIMEOUT_S)
    reply = await context.client.call(SaveCache(timeout_s), timeout_s + CALL_TIMEOUT_S)
    return _done("save_cache", reply)


def _done(event: str, reply: SuccessReply) -> ASGIApp:
    log.info(event, success=reply.success)
    if not reply.success:
        raise ApiError(400, reply.message)
    return json_response(plain(reply))


ROUTES = (
    get("/cache", get_cache, "What is cached, in memory and on disk", access="admin"),
    post("/cache/clear", clear_cache, "Remove all files of cached KV", access="admin"),
    post(
        "/cache/save",
        save_cache,
        "Write what is cached in memory",
        query=("timeout",),
        access="admin",
    ),
)

"""Routes about what outlives the server: counts of it, and the removal of old or all of it."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.config.numbers import counted
from weft.observe.log import EventLog
from weft.server.body import json_response, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.operation import get, post
from weft.state.store import FORMAT, KindCount, StateError, StateStore

log = EventLog("admin")


class StateAnswer(msgspec.Struct, kw_only=True):
    folder: str
    format: int
    kinds: list[KindCount]
    fault: str = ""  # why the last write failed; it is tried again each second


class PruneBody(msgspec.Struct, kw_only=True):
    """Remove what nobody has used for a time."""

    older_than_s: float


class RemovedAnswer(msgspec.Struct, kw_only=True):
    responses: int
    sessions: int


async def get_state(
    context: ServerContext,
    request: Request,
) -> ASGIApp:
    """Counts, bytes and ages of what is stored, by kind; 400 without `--state-dir`."""
    state = _state(context)
    fault = state.fault or state.why_gone()
    kinds: list[KindCount] = []
    try:
        kinds = await state.counts()
    except StateError as exc:
        fault = fault or str(exc)
    answer = StateAnswer(folder=str(state.folder), format=FORMAT, kinds=kinds, fault=fault)
    return json_response(answer)


async def prune(
    context: ServerContext,
    request: Request,
) -> ASGIApp:
    """Remove stored responses and sessions that nobody has used for `older_than_s`."""
    body = await read_json(context, request, PruneBody)
    return json_response(await _remove(context, body.older_than_s))


async def clear(
    context: ServerContext,
    request: Request,
) -> ASGIApp:
    """Remove all stored responses, except those that are still generated, and close all
    sessions; also on a disk without room."""
    return json_response(await _remove(context, 0.0, is_all=True))


async def _remove(
    context: ServerContext,
    older_than_s: float,
    *,
    is_all: bool = False,
) -> RemovedAnswer:
    state = _state(context)
    assert context.sessions is not None, "sessions are kept with the rest"
    num_responses = context.responses.prune(older_than_s)
    num_sessions = await context.sessions.prune(context.client, older_than_s)
    try:
        await _settle(context, state, is_all=is_all)
    except StateError as exc:  # logged where it was raised
        removed = f"{counted(num_responses, 'response')} and {counted(num_sessions, 'session')}"
        message = (
            f"the server's disk takes nothing: {removed} were removed, but are still on the disk; "
            "this is tried again each second"
        )
        raise ApiError(503, message) from exc
    await state.give_back()
    log.info("state_removed", responses=num_responses, sessions=num_sessions)
    return RemovedAnswer(responses=num_responses, sessions=num_sessions)


async def _settle(context: ServerContext, state: StateStore, *, is_all: bool) -> None:
    """Wait until the removed records are off the disk. Raises StateError."""
    try:
        await state.settled()
    except StateError:
        # A deletion takes room until it is written. If everything goes, it need not be written.
        if not is_all or not await state.begin_anew():
            raise
        context.responses.put_again()
        context.batches.put_again()
        await state.settled()


def _state(context: ServerContext) -> StateStore:
    if context.state is None:
        raise ApiError(400, "this server stores nothing: it was started without --state-dir")
    return context.state


ROUTES = (
    get("/state", get_state, "What outlives the server", answer=StateAnswer, access="admin"),
    post(
        "/state/prune",
        prune,
        "Remove what nobody has used for a time",
        PruneBody,
        answer=RemovedAnswer,
        access="admin",
    ),
    post(
        "/state/clear",
        clear,
        "Remove stored responses and sessions",
        answer=RemovedAnswer,
        access="admin",
    ),
)

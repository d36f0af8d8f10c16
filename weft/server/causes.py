"""Why not more of a prompt came from the cache, in the answer of a request that asks for it
(`return_cache_cause`).

The engine is asked when the request has ended, so requests that do not ask pay nothing. Of a
request of another tenant only lengths are shown, except to an administrator.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request

from weft.client.calls import EngineFault
from weft.client.engine_state import EngineUnavailable
from weft.client.explained import explained
from weft.client.generation import Completion, Generation
from weft.json_types import JsonObject
from weft.messages.control import CacheCause
from weft.messages.requests import ADMINISTRATOR
from weft.server.auth import administers, owner_of
from weft.server.context import ServerContext

MAX_PROMPTS = 64  # of one request, about which the engine is asked


def cause_reader(request: Request, tenant: str) -> str:
    """The tenant whose requests a client may read about: `ADMINISTRATOR`, if `GET /requests/{rid}`
    would answer it; empty if clients have no keys, because then nobody knows whose requests are
    whose."""
    if administers(request):
        return ADMINISTRATOR
    return tenant if owner_of(request) else ""


async def ask_causes(context: ServerContext, generation: Generation) -> None:
    """Ask for the causes of the completions that have ended. Those of one prompt have one cause, so
    only the first of them is asked about. Without an answer of the engine there is no cause."""
    for completion in generation.completions[:: _num_of_prompt(generation)][:MAX_PROMPTS]:
        request = completion.spec.request
        if completion.end is None or request.id in generation.causes:
            continue
        viewer = request.tells_cause_to
        if viewer == ADMINISTRATOR:
            viewer = None
        try:
            found = await explained(context.client, request.rid, number=request.id, viewer=viewer)
        except (EngineUnavailable, EngineFault):
            continue
        for one in found:
            if one.cache_cause is not None:
                generation.causes[request.id] = cause_fields(context, one.cache_cause)


def cause_fields(context: ServerContext, cause: CacheCause) -> JsonObject:
    """A cause with the tokens at which the prompts part as text."""
    fields: JsonObject = msgspec.to_builtins(cause)
    for name in ("ours", "theirs"):
        fields[f"{name}_text"] = context.tokenizer.decode(fields[name], skip_special_tokens=False)
    return fields


def cause_of_prompts(completions: Sequence[Completion]) -> JsonObject | None:
    """Of several prompts, the cause that cost the most tokens; None if none is known."""
    found: list[JsonObject] = []
    for completion in completions:
        cause = completion.generation.causes.get(completion.spec.request.id)
        if cause is not None:
            found.append(cause)
    return max(found, key=_missed, default=None)


def _missed(cause: JsonObject) -> int:
    return int(cause["missed_tokens"])


def _num_of_prompt(generation: Generation) -> int:
    return generation.completions[0].spec.request.sampling.n

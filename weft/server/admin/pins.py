"""Routes that pin and unpin prompts in the prefix cache by hand."""

from __future__ import annotations

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.client.aux_outputs import cache_use
from weft.client.requests import pack_ids
from weft.messages.by_name import plain
from weft.messages.pins import PinMark, Unpin
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.observe.log import EventLog
from weft.server.admin.prefixes import Prefix, PrefixBody, prefix_of
from weft.server.body import json_response, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError, failed
from weft.server.limits import check_size
from weft.server.operation import delete, post
from weft.server.requests import submit

log = EventLog("admin")
DEFAULT_TTL_S = 3_600.0
MAX_NAME_LEN = 128  # characters


class PinBody(PrefixBody):
    """Pin one of `messages`, `prompt`, `input_ids` and `node`. Tokens that are not cached are
    computed."""

    ttl_s: float = DEFAULT_TTL_S  # seconds after its last use by a request that marks it
    name: str | None = None  # default: generated
    tenant: str | None = None  # its --tenant-cache counts; default: the key's tenant


class PinAnswer(msgspec.Struct, kw_only=True):
    name: str
    tokens: int  # pinned tokens: whole pages
    prompt_tokens: int
    cached_tokens: int  # tokens that were already cached
    ttl_s: float


async def pin(context: ServerContext, request: Request) -> ASGIApp:
    """Compute the uncached part of a prompt, and pin the prompt; a 400 gives the reason if it is
    not pinned."""
    body = await read_json(context, request, PinBody)
    name = body.name or f"pin-{request.scope['weft.rid']}"
    if not name.isprintable() or "/" in name or len(name) > MAX_NAME_LEN:
        message = f"name must be at most {MAX_NAME_LEN} printable characters, without /"
        raise ApiError(400, message, param="name")
    found = await prefix_of(context, request, body)
    if body.node is not None and _has_media(context, found):
        message = "a prompt is pinned up to its first picture, video or sound: give it as messages"
        raise ApiError(400, message, param="node")
    mark = PinMark(length=len(found.ids), ttl_s=body.ttl_s, name=name)
    sampling = SamplingParams(max_new_tokens=0)
    check_size(context, [len(found.ids)], [1])
    pinning = GenerateRequest(
        input_ids=pack_ids(found.ids, context.client.engine.vocab_size),
        media=found.media,
        sampling=sampling,
        rid=str(request.scope["weft.rid"]),
        tenant=found.tenant if body.tenant is None else body.tenant,
        cache_salt=found.cache_salt,
        adapter=found.adapter,
        pins=(mark,),
    )
    with submit(context, [pinning], stream=False) as generation:
        async for _ in generation:
            pass
        [completion] = generation.completions
    end = completion.end
    assert end is not None, "a generation ended without a final word"
    if end.failed:
        raise failed(end.status, end.message, end.retry_after_s)
    use = cache_use(completion.aux_outputs)
    log.info("pin", name=name, tokens=use.pinned_tokens)
    if not use.pinned_tokens:
        raise ApiError(400, f"it is not pinned: {use.why}")
    answer = PinAnswer(
        name=name,
        tokens=use.pinned_tokens,
        prompt_tokens=end.prompt_tokens,
        cached_tokens=end.cached_tokens,
        ttl_s=body.ttl_s,
    )
    return json_response(answer)


async def unpin(context: ServerContext, request: Request) -> ASGIApp:
    """Remove a pin; 404 if no pin has this name."""
    name = request.path_params["name"]
    reply = await context.client.call(Unpin(name=name))
    log.info("unpin", name=name, success=reply.success)
    if not reply.success:
        raise ApiError(404, reply.message, param="name")
    return json_response(plain(reply))


def _has_media(context: ServerContext, prefix: Prefix) -> bool:
    """Whether a prefix contains media: their placeholder ids are outside the vocabulary."""
    ids = np.array(prefix.ids)
    return bool(ids.min() < 0 or ids.max() >= context.client.engine.vocab_size)


ROUTES = (
    post(
        "/cache/pin",
        pin,
        "Pin a prompt in the prefix cache",
        PinBody,
        answer=PinAnswer,
        access="admin",
    ),
    delete("/cache/pin/{name}", unpin, "Remove a pin", access="admin"),
)

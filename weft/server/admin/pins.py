"""Routes that pin prompts in the prefix cache by hand, and let them go."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.client.aux_outputs import cache_use
from weft.client.prompt import Prompt
from weft.json_types import JsonObject
from weft.messages.by_name import plain
from weft.messages.pins import PinMark, Unpin
from weft.messages.sampling import SamplingParams
from weft.observe.log import EventLog
from weft.server.body import json_response, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError, failed
from weft.server.openai.conversation import ChatPrompt, chat_prompt
from weft.server.openai.models import ChatMessage, ChatRequest
from weft.server.operation import delete, post
from weft.server.submit import adapter_of, encode_texts, require_model, sharing_of, submit

log = EventLog("admin")
DEFAULT_TTL_S = 3_600.0
MAX_NAME_LEN = 128  # characters


class PinBody(msgspec.Struct, kw_only=True):
    """Pin one of `messages`, `prompt` and `input_ids`. What is not cached is computed."""

    messages: list[ChatMessage] | None = None  # up to the end of the last one
    tools: list[JsonObject] | None = None  # beside messages
    chat_template_kwargs: JsonObject | None = None
    prompt: str | None = None
    input_ids: list[int] | None = None
    ttl_s: float = DEFAULT_TTL_S  # from the last use by a request that pins it, too
    name: str | None = None  # one is made up if it is not given
    tenant: str | None = None  # whose --tenant-cache counts; the key's own if it is not given
    model: str | None = None
    lora_path: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None


class PinAnswer(msgspec.Struct, kw_only=True):
    name: str
    tokens: int  # that are pinned: whole pages
    prompt_tokens: int
    cached_tokens: int  # that need not be computed for it
    ttl_s: float


async def pin(context: ServerContext, request: Request) -> ASGIApp:
    """Compute a prompt as far as it is not cached, and pin it; 400 says why it is not pinned."""
    body = await read_json(context, request, PinBody)
    require_model(context, body.model)
    name = body.name or f"pin-{request.scope['weft.rid']}"
    if not name.isprintable() or "/" in name or len(name) > MAX_NAME_LEN:
        message = f"name must be at most {MAX_NAME_LEN} printable characters, without /"
        raise ApiError(400, message, param="name")
    found = await _prompt(context, body)
    sharing = sharing_of(context, request, salt=body.cache_salt, extra_key=body.extra_key)
    mark = PinMark(length=len(found.ids), ttl_s=body.ttl_s, name=name)
    prompt = Prompt(
        ids=found.ids,
        media=found.media,
        params=SamplingParams(max_new_tokens=0),
        rid=str(request.scope["weft.rid"]),
        tenant=sharing.tenant if body.tenant is None else body.tenant,
        cache_salt=sharing.cache_salt,
        adapter=adapter_of(context, body.model, body.lora_path),
        pins=(mark,),
    )
    with submit(context, [prompt], stream=False) as generation:
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
    """Let a pin go; 404 if there is none of this name."""
    name = request.path_params["name"]
    reply = await context.client.call(Unpin(name=name))
    log.info("unpin", name=name, success=reply.success)
    if not reply.success:
        raise ApiError(404, reply.message, param="name")
    return json_response(plain(reply))


async def _prompt(context: ServerContext, body: PinBody) -> ChatPrompt:
    """The one prompt that a body has."""
    given = [body.messages, body.prompt, body.input_ids]
    if sum(one is not None for one in given) != 1:
        raise ApiError(400, "one of messages, prompt and input_ids is needed", param="messages")
    if body.messages is not None:
        chat = ChatRequest(
            messages=body.messages,
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=False,
        )
        return await chat_prompt(context, chat)
    if body.prompt is not None:
        [ids] = await encode_texts(context, [body.prompt], add_special_tokens=True)
        return ChatPrompt(ids)
    assert body.input_ids is not None
    return ChatPrompt(body.input_ids)


ROUTES = (
    post(
        "/cache/pin",
        pin,
        "Pin a prompt in the prefix cache",
        PinBody,
        answer=PinAnswer,
        access="admin",
    ),
    delete("/cache/pin/{name}", unpin, "Let a pinned prompt go", access="admin"),
)

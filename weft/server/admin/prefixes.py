"""Routes about one prefix of the cache: what it is and who uses it, and how it is forgotten.

A prefix is named as a prompt is, or by the number that its node has in the tree of pictures
(`GET /events`). Of several engines each has numbers of its own: the header X-data-parallel-rank
says whose they are, else they are the first engine's.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.client.pictures import text_of_ids
from weft.json_types import JsonObject
from weft.messages.cache import ForgetPrefix
from weft.messages.media import ID_BYTES, MediaItem
from weft.messages.picture import GetPrefix, GetPrefixReply
from weft.observe.log import EventLog
from weft.server.body import json_response, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.fields.numbers import query_number
from weft.server.openai.conversation import chat_prompt
from weft.server.openai.models import ChatMessage, ChatRequest
from weft.server.operation import get, post
from weft.server.submit import adapter_of, encode_texts, require_model, sharing_of

log = EventLog("admin")
MAX_SHOWN = 4_096  # tokens of a node whose text is told


class PrefixBody(msgspec.Struct, kw_only=True):
    """One of `messages`, `prompt`, `input_ids` and `node`."""

    messages: list[ChatMessage] | None = None  # up to the end of the last one
    tools: list[JsonObject] | None = None  # beside messages
    chat_template_kwargs: JsonObject | None = None
    prompt: str | None = None
    input_ids: list[int] | None = None
    node: int | None = None  # of the tree of a picture, up to its end
    model: str | None = None
    lora_path: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None


class ForgetBody(PrefixBody):
    """Forget what is cached of one of `messages`, `prompt`, `input_ids` and `node`, and all that
    goes on from there."""

    keep: int = 0  # tokens at its beginning that stay in any case


class ForgetAnswer(msgspec.Struct, kw_only=True):
    tokens: int  # that are not cached any more
    left: int  # of the prefix, that still are: they are in use, or lead to something else
    message: str = ""  # what is found again in a store


class PrefixAnswer(msgspec.Struct, kw_only=True):
    node: int
    text: str  # of its first tokens
    tokens: int  # of its own
    before: int  # tokens of the nodes above
    hits: int  # requests that have begun with it
    requests: list[str]  # that use it now
    pins: list[str]  # and the names of pins and sessions that keep it


class Prefix(NamedTuple):
    """A prefix that is asked for."""

    ids: list[int]  # as the cache compares them
    media: tuple[MediaItem, ...]
    tenant: str
    cache_salt: str
    adapter: str  # its uid; nothing: none

    @property
    def packed(self) -> bytes:
        return np.array(self.ids, dtype=np.int32).tobytes()


async def prefix_of(context: ServerContext, request: Request, body: PrefixBody) -> Prefix:
    """The one that a body names. Raises `ApiError` for none, for several, and for a node that is
    not there any more."""
    given = [body.messages, body.prompt, body.input_ids, body.node]
    if sum(one is not None for one in given) != 1:
        message = "one of messages, prompt, input_ids and node is needed"
        raise ApiError(400, message, param="messages")
    require_model(context, body.model)
    sharing = sharing_of(context, request, salt=body.cache_salt, extra_key=body.extra_key)
    if body.node is not None:
        found = await _node(context, body.node)
        ids = np.frombuffer(found.tokens, np.int32).tolist()
        return Prefix(ids, (), sharing.tenant, found.cache_salt, found.adapter)
    adapter = adapter_of(context, body.model, body.lora_path)
    ids, media = await _prompt(context, body)
    return Prefix(ids, media, sharing.tenant, sharing.cache_salt, adapter)


async def _prompt(
    context: ServerContext, body: PrefixBody
) -> tuple[list[int], tuple[MediaItem, ...]]:
    if body.messages is not None:
        chat = ChatRequest(
            messages=body.messages,
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=False,
        )
        found = await chat_prompt(context, chat)
        return found.ids, found.media
    if body.prompt is not None:
        [ids] = await encode_texts(context, [body.prompt], add_special_tokens=True)
        return ids, ()
    assert body.input_ids is not None
    return body.input_ids, ()


async def _node(context: ServerContext, node: int) -> GetPrefixReply:
    found = await context.client.call(GetPrefix(node=node))
    if not found.tokens:
        message = f"node {node} is not among the largest of the last picture any more"
        raise ApiError(400, message, param="node")
    return found


async def get_prefix(context: ServerContext, request: Request) -> ASGIApp:
    """A node of the prefix cache, with its text; 400 if the last picture has none of its number."""
    node = int(query_number(request, "node", 0))
    found = await _node(context, node)
    own = found.tokens[found.start * ID_BYTES :]
    # Four thousand tokens take some milliseconds: not on the loop that serves.
    text = await asyncio.to_thread(
        text_of_ids,
        own[: MAX_SHOWN * ID_BYTES],
        context.tokenizer,
        context.client.engine.vocab_size,
    )
    answer = PrefixAnswer(
        node=node,
        text=text,
        tokens=len(own) // ID_BYTES,
        before=found.start,
        hits=found.hits,
        requests=found.requests,
        pins=found.pins,
    )
    return json_response(answer)


async def forget(context: ServerContext, request: Request) -> ASGIApp:
    """Forget a prefix, in all engines; 400 if nothing of it is cached, 409 if all of it stays."""
    body = await read_json(context, request, ForgetBody)
    wanted = await prefix_of(context, request, body)
    if wanted.media:
        message = "a prompt with pictures, videos or sounds is forgotten by its node"
        raise ApiError(400, message, param="messages")
    question = ForgetPrefix(
        tokens=wanted.packed,
        cache_salt=wanted.cache_salt,
        adapter=wanted.adapter,
        keep=body.keep,
    )
    reply = await context.client.call(question)
    log.info("forget", tokens=reply.tokens, left=reply.left)
    if not reply.tokens and not reply.left:
        raise ApiError(400, "nothing of it is cached, in whole pages")
    if not reply.tokens:
        message = f"its {reply.left:,} cached tokens are in use, or other prompts go on from there"
        raise ApiError(409, message)
    answer = ForgetAnswer(tokens=reply.tokens, left=reply.left, message=reply.stored)
    return json_response(answer)


ROUTES = (
    get(
        "/cache/prefix",
        get_prefix,
        "A node of the prefix cache",
        answer=PrefixAnswer,
        query=("node",),
        access="admin",
    ),
    post(
        "/cache/forget",
        forget,
        "Forget a prefix",
        ForgetBody,
        answer=ForgetAnswer,
        access="admin",
    ),
)

"""Routes about one prefix of the cache: its content and users, and removing it.

A request names a prefix as it names a prompt, or by the number of its node in the tree of the
pictures (`GET /events`). Each of several engines numbers its own nodes: the header
X-data-parallel-rank selects the engine, else it is the first one.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.client.pictures import shown_tree, text_of_ids
from weft.json_types import JsonObject
from weft.messages.cache import ForgetPrefix
from weft.messages.media import ID_BYTES, MediaItem
from weft.messages.picture import GetPrefix, GetPrefixReply, TreeColumns, Watch
from weft.observe.log import EventLog
from weft.server.body import json_response, read_json
from weft.server.chat.conversation import chat_prompt
from weft.server.chat.models import ChatMessage, ChatRequest
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.fields.numbers import query_number
from weft.server.model_names import adapter_of
from weft.server.operation import get, post
from weft.server.prompt_ids import encode_texts
from weft.server.requests import sharing_of

log = EventLog("admin")
MAX_SHOWN = 4_096  # tokens of a node that are shown as text
TREE_S = 30.0  # longest wait for a walk over the tree
LOOK_AGAIN_S = 0.03  # between two questions whether it has ended


class PrefixBody(msgspec.Struct, kw_only=True):
    """One of `messages`, `prompt`, `input_ids` and `node`."""

    messages: list[ChatMessage] | None = None  # the prefix ends with the last message
    tools: list[JsonObject] | None = None  # only with messages
    chat_template_kwargs: JsonObject | None = None
    prompt: str | None = None
    input_ids: list[int] | None = None
    node: int | None = None  # number in the tree of a picture; the prefix ends with it
    model: str | None = None
    lora_path: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None


class ForgetBody(PrefixBody):
    """Remove from the cache the prefix named by one of `messages`, `prompt`, `input_ids` and
    `node`, and all its continuations."""

    keep: int = 0  # tokens at its beginning that are always kept


class ForgetAnswer(msgspec.Struct, kw_only=True):
    tokens: int  # tokens removed from the cache
    left: int  # tokens of the prefix still cached: in use, or shared with other prompts
    message: str = ""  # about copies that remain in stores


class PrefixAnswer(msgspec.Struct, kw_only=True):
    node: int
    text: str  # text of its first tokens
    tokens: int  # number of its own tokens
    before: int  # tokens of its ancestors
    hits: int  # requests that started with it
    requests: list[str]  # names of requests that use it now
    pins: list[str]  # names of pins and sessions that keep it


class TreeNode(msgspec.Struct, kw_only=True):
    node: int  # its number
    depth: int  # number of its ancestors
    tokens: int  # number of its own tokens
    below: int  # tokens of the node and of all nodes below it
    age: int  # uses of the cache since its last use
    locks: int  # running requests, pins and sessions that hold it
    pins: int  # pins and sessions that give way if memory is needed
    text: str  # text of its first tokens


class TreeAnswer(msgspec.Struct, kw_only=True):
    nodes: list[TreeNode]  # the heaviest ones, parents before their children
    visited: int  # number of visited nodes
    whole: bool  # all nodes were visited; false: there are too many


class Prefix(NamedTuple):
    """A prefix that a request names."""

    ids: list[int]  # as the keys of the cache
    media: tuple[MediaItem, ...]
    tenant: str
    cache_salt: str
    adapter: str  # uid; "": no adapter

    @property
    def packed(self) -> bytes:
        return np.array(self.ids, dtype=np.int32).tobytes()


async def prefix_of(context: ServerContext, request: Request, body: PrefixBody) -> Prefix:
    """The prefix that a body names. Raises `ApiError` for no name, for several names, and for a
    node that no longer exists."""
    ways = [body.messages, body.prompt, body.input_ids, body.node]
    if sum(one is not None for one in ways) != 1:
        message = "one of messages, prompt, input_ids and node is needed"
        raise ApiError(400, message, param="messages")
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
    """A node of the prefix cache, with its text; 400 if the last picture has no node of this
    number."""
    node = int(query_number(request, "node", 0))
    found = await _node(context, node)
    own = found.tokens[found.start * ID_BYTES :]
    # Decoding thousands of tokens takes some milliseconds: not on the event loop.
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


async def get_tree(context: ServerContext, request: Request) -> ASGIApp:
    """The heaviest nodes of the prefix cache; 503 if the engine needs too long to visit them."""
    now = asyncio.get_running_loop().time
    until_s = now() + TREE_S
    picture = await context.client.call(Watch())
    while picture.tree is None:
        if now() > until_s:
            message = f"the tree was not visited completely within {TREE_S:g} s; ask again"
            raise ApiError(503, message)
        await asyncio.sleep(LOOK_AGAIN_S)
        picture = await context.client.call(Watch())
    nodes = await asyncio.to_thread(_nodes_of, context, picture.tree)
    answer = TreeAnswer(
        nodes=nodes,
        visited=picture.tree.num_nodes,
        whole=picture.tree.is_whole,
    )
    return json_response(answer)


def _nodes_of(context: ServerContext, tree: TreeColumns) -> list[TreeNode]:
    vocab_size = context.client.engine.vocab_size
    columns = shown_tree(tree, lambda head: text_of_ids(head, context.tokenizer, vocab_size))
    found: list[TreeNode] = []
    for i, parent in enumerate(columns["parent"]):
        node = TreeNode(
            node=columns["node"][i],
            depth=found[parent].depth + 1 if parent >= 0 else 0,
            tokens=columns["tokens"][i],
            below=columns["below"][i],
            age=columns["age"][i],
            locks=columns["locks"][i],
            pins=columns["pins"][i],
            text=columns["text"][i],
        )
        found.append(node)
    return found


async def forget(context: ServerContext, request: Request) -> ASGIApp:
    """Remove a prefix from the caches of all engines; 400 if none of it is cached, 409 if nothing
    could be removed."""
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
        raise ApiError(400, "no whole page of the prompt is cached")
    if not reply.tokens:
        message = (
            f"its {reply.left:,} cached tokens are in use, or other prompts continue from there"
        )
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
    get(
        "/cache/tree",
        get_tree,
        "The prefix cache as a tree",
        answer=TreeAnswer,
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

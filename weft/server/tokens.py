"""`/tokenize` and `/detokenize`, with the fields of both vLLM and SGLang, and llama.cpp's
`/apply-template`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.json_types import JsonObject
from weft.server.body import json_response, read_json
from weft.server.chat.answers import token_name
from weft.server.chat.conversation import chat_prompt, chat_text
from weft.server.chat.models import ChatMessage, ChatRequest
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.operation import get, post
from weft.server.prompt_ids import encode_texts
from weft.text.tokenizer import Tokenizer

INLINE_TOKENS = 4_096  # up to which names are made on the event loop


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[ChatMessage] | None = None
    tools: list[JsonObject] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    mm_processor_kwargs: JsonObject | None = None  # sizes of images (vLLM)
    return_token_strs: bool | None = None


class TemplateRequest(msgspec.Struct, kw_only=True):
    """The fields that determine the prompt of a chat."""

    model: str | None = None
    messages: list[ChatMessage]
    tools: list[JsonObject] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int | list[int]]
    skip_special_tokens: bool | None = None


async def tokenize(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if body.messages is not None:
        prompt = await chat_prompt(context, _as_chat(body, body.messages))
        return await _tokenized(context, body, prompt.ids, len(prompt.ids))
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
    special = body.add_special_tokens is not False
    found = await encode_texts(context, texts, add_special_tokens=special)
    if isinstance(body.prompt, str):
        return await _tokenized(context, body, found[0], len(found[0]))
    return await _tokenized(context, body, found, [len(ids) for ids in found])


async def apply_template(context: ServerContext, request: Request) -> ASGIApp:
    """The prompt of a chat, as text."""
    body = await read_json(context, request, TemplateRequest)
    found = await chat_text(context, _as_chat(body, body.messages))
    return json_response({"prompt": found.text})


async def detokenize(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, DetokenizeRequest)
    kinds = set(map(type, body.tokens))
    if len(kinds) > 1:
        raise ApiError(400, "tokens mixes ids with lists", param="tokens")
    is_batch = kinds == {list}
    lists = cast(list[list[int]], body.tokens if is_batch else [body.tokens])
    _ = context.client.engine  # raises if the vocabulary is unknown: then the ids are not checked
    texts = await context.tokenizer.decode_all_async(
        lists, skip_special_tokens=bool(body.skip_special_tokens)
    )
    text = texts if is_batch else texts[0]
    return json_response({"prompt": text, "text": text})


async def tokenizer_info(context: ServerContext, request: Request) -> ASGIApp:
    """Facts that let a client tokenize and render as this server does."""
    templates = context.tokenizer.chat_templates
    return json_response(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context.info.context_length,
            "vocab_size": context.tokenizer.vocab_size,
            "chat_template": templates.get("default"),
            **context.tokenizer.special_tokens,
        }
    )


def _as_chat(body: TokenizeRequest | TemplateRequest, messages: list[ChatMessage]) -> ChatRequest:
    request = ChatRequest(
        messages=messages,
        tools=body.tools,
        tool_choice="none",
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    if isinstance(body, TokenizeRequest):
        request.add_special_tokens = body.add_special_tokens
        request.mm_processor_kwargs = body.mm_processor_kwargs
    return request


async def _tokenized(
    context: ServerContext,
    body: TokenizeRequest,
    ids: list[int] | list[list[int]],
    count: int | list[int],
) -> ASGIApp:
    answer: JsonObject = {
        "tokens": ids,
        "count": count,
        "max_model_len": context.info.context_length,
    }
    if body.return_token_strs:
        work = partial(_names_of, context.tokenizer, ids)
        num = count if isinstance(count, int) else sum(count)
        if num <= INLINE_TOKENS:
            answer["token_strs"] = work()
        else:
            answer["token_strs"] = await context.readers.run(work, is_long=True)
    return json_response(answer)


def _names_of(tokenizer: Tokenizer, ids: Sequence[int | list[int]]) -> list[Any]:
    names: list[Any] = []
    for item in ids:
        if isinstance(item, int):
            names.append(token_name(tokenizer, item))
        else:
            names.append([token_name(tokenizer, token) for token in item])
    return names


_TOKENIZE = "Text or messages to token ids"
_DETOKENIZE = "Token ids to text"
ROUTES = (
    post("/tokenize", tokenize, _TOKENIZE, TokenizeRequest),
    post("/v1/tokenize", tokenize, _TOKENIZE, TokenizeRequest),
    post("/detokenize", detokenize, _DETOKENIZE, DetokenizeRequest),
    post("/v1/detokenize", detokenize, _DETOKENIZE, DetokenizeRequest),
    post(
        "/apply-template",
        apply_template,
        "The prompt of a chat as text (llama.cpp)",
        TemplateRequest,
    ),
    get("/tokenizer_info", tokenizer_info, "Special tokens and chat template"),
)

"""Vectors of texts and media, in the forms of OpenAI, vLLM, SGLang and Ollama.

`/v1/embeddings` is OpenAI's, `/encode` SGLang's, `/api/embed` and `/api/embeddings` are Ollama's.
This module does not know how a vector is computed.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from weft.client.generation import Delta
from weft.json_types import JsonObject
from weft.messages.media import MediaItem
from weft.messages.requests import PoolingParams
from weft.messages.status import Pools
from weft.server.body import json_response, read_json
from weft.server.chat.answers import add_media
from weft.server.chat.models import PromptTokensDetails
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.media import require_uncut
from weft.server.model_names import answering_name
from weft.server.operation import post
from weft.server.pooling.forms import marked, require_vectors, written
from weft.server.pooling.inputs import (
    Vector,
    answer,
    dimensions,
    encoded,
    require_pools,
    require_texts,
    split,
    start,
    usage,
)
from weft.server.pooling.messages import PooledPrompts, from_messages
from weft.server.pooling.models import (
    EmbeddingRequest,
    EncodeRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    PooledRequest,
    SeenInput,
    Texts,
)
from weft.server.sglang.media import KINDS, NO_MEDIA, load_media
from weft.text.tokenizer import Encoded

EMBED = "embeddings need a model that makes vectors"


async def embeddings(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, EmbeddingRequest)
    pools = require_pools(context, "embed", EMBED)
    pooling = PoolingParams(
        normalize=body.normalize,
        dimensions=dimensions(pools, body.dimensions),
    )
    prompts = await _prompts(context, body, pools)
    generation = start(context, request, body, prompts.inputs, pooling, prompts.media)

    def make(vectors: list[Vector], deltas: list[Delta]) -> JsonObject:
        data: list[JsonObject] = []
        for index, vector in enumerate(vectors):
            embedding = written(pools, vector, body.encoding_format)
            data.append(
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": embedding,
                }
            )
        return {
            "object": "list",
            "data": data,
            "model": answering_name(context, body.model, body.lora_path),
            "usage": _seen_usage(deltas, prompts.all_media),
        }

    return answer(generation, "input", make)


async def _prompts(context: ServerContext, body: EmbeddingRequest, pools: Pools) -> PooledPrompts:
    """The prompts of `input` or `messages`."""
    inputs = body.input
    if body.input_type is not None and not any(pools.markers):
        message = "input_type is set, but this model marks neither queries nor documents"
        raise ApiError(400, message, param="input_type")
    if body.messages is not None:
        return await from_messages(context, body)
    if inputs is None:
        raise ApiError(400, "give either input or messages", param="input")
    if isinstance(inputs, str):
        texts: Texts = inputs
    else:
        plain = [one for one in inputs if not isinstance(one, SeenInput)]
        if len(plain) < len(inputs):
            return await from_messages(context, body)
        texts = plain
    parts = split("input", texts)
    require_texts("input", parts)
    found = await encoded(context, parts, body, param="input")
    sides = [body.input_type or "document"] * len(parts)
    return PooledPrompts(marked(context, pools, parts, found, sides, "input"), [])


def _seen_usage(deltas: list[Delta], media: list[MediaItem]) -> JsonObject:
    """The usage, with the numbers of placeholder tokens of images, videos and sounds, if there are
    any."""
    found: JsonObject = {**usage(deltas)}
    if media:
        num_cached = sum(delta.end.cached_tokens for delta in deltas if delta.end is not None)
        details = PromptTokensDetails(num_cached)
        add_media(details, media)
        found["prompt_tokens_details"] = details
    return found


async def encode(context: ServerContext, request: Request) -> ASGIApp:
    """One object for one input, a list for a list."""
    body = await read_json(context, request, EncodeRequest)
    pools = require_pools(context, "embed", "/encode needs a model that makes vectors")
    texts = text_or_ids(body.text, body.input_ids)
    parts = split("text", texts)
    media = NO_MEDIA
    if body.image_data or body.video_data or body.audio_data:
        require_uncut(body.truncate_prompt_tokens)
        media_fields = {name: getattr(body, name) for name in KINDS}
        is_batch = isinstance(texts, list) and not isinstance(texts[0], int)
        prompts = [part for part in parts if not isinstance(part, tuple)]
        media = await load_media(
            context,
            media_fields,
            prompts,
            is_batch=is_batch,
            kwargs=body.mm_processor_kwargs,
        )
        parts = list(media.sources)
    else:
        require_texts("text", parts)
    inputs = await encoded(
        context,
        parts,
        body,
        param="text",
        is_uncut=bool(media.loaded),
    )
    placed: list[tuple[MediaItem, ...]] = []
    if media.loaded:
        placed = [media.placed(index, tokens.ids) for index, tokens in enumerate(inputs)]
    if body.token_type_ids is not None:
        inputs = _typed(inputs, body.token_type_ids, max(pools.num_token_types, 1))
    pooling = PoolingParams(dimensions=dimensions(pools, body.dimensions))
    generation = start(context, request, body, inputs, pooling, placed)

    def make(vectors: list[Vector], deltas: list[Delta]) -> Any:
        rid = generation.completions[0].spec.request.rid
        return native(pools, vectors, deltas, texts, rid)

    return answer(generation, "text", make)


async def ollama_embed(context: ServerContext, request: Request) -> ASGIApp:
    """An input that is too long is truncated, unless `truncate` is false."""
    body = await read_json(context, request, OllamaEmbedRequest)
    pools = require_pools(context, "embed", EMBED)
    require_vectors(pools, "/api/embed")
    began = time.perf_counter()
    if isinstance(body.input, list):
        texts = body.input
    else:
        texts = [body.input or ""]
    name = answering_name(context, body.model)
    # Clients send an empty input to make the server load a model.
    if body.input is None or not any(texts):
        return json_response({"model": name, "embeddings": []})
    plain = PooledRequest(model=body.model, truncate_prompt_tokens=-1)
    if body.truncate is False:
        plain.truncate_prompt_tokens = None
    inputs = await encoded(context, texts, plain, param="input")
    pooling = PoolingParams(dimensions=dimensions(pools, body.dimensions))

    def make(vectors: list[Vector], deltas: list[Delta]) -> JsonObject:
        passed_s = time.perf_counter() - began
        return {
            "model": name,
            "embeddings": [vector.tolist() for vector in vectors],
            "total_duration": int(passed_s * 1e9),
            "load_duration": 0,
            "prompt_eval_count": usage(deltas)["prompt_tokens"],
        }

    generation = start(context, request, plain, inputs, pooling)
    return answer(generation, "input", make)


async def ollama_embeddings(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, OllamaEmbeddingsRequest)
    require_vectors(require_pools(context, "embed", EMBED), "/api/embeddings")
    if not body.prompt:
        return json_response({"embedding": []})
    plain = PooledRequest(model=body.model, truncate_prompt_tokens=-1)
    inputs = await encoded(context, [body.prompt], plain, param="prompt")
    generation = start(context, request, plain, inputs, PoolingParams())

    def make(vectors: list[Vector], deltas: list[Delta]) -> JsonObject:
        [vector] = vectors
        return {"embedding": vector.tolist()}

    return answer(generation, "prompt", make)


def text_or_ids(text: str | list[str] | None, ids: list[int | list[int]] | None) -> Texts:
    if text is not None and ids is None:
        if isinstance(text, str):
            return text
        return [*text]
    if ids is not None and text is None:
        return [*ids]
    message = "give either text or input_ids"
    raise ApiError(400, message, param="text")


def native(
    pools: Pools,
    vectors: list[Vector],
    deltas: list[Delta],
    texts: Texts,
    rid: str,
) -> Any:
    """SGLang's answer."""
    answers: list[JsonObject] = []
    for vector, delta in zip(vectors, deltas, strict=True):
        assert delta.end is not None
        meta = {
            "id": rid,
            "prompt_tokens": delta.end.prompt_tokens,
            "finish_reason": {"type": "length", "length": 0},
            "e2e_latency": delta.end.e2e_s,
        }
        answers.append({"embedding": written(pools, vector), "meta_info": meta})
    # One text, or its ids, gets one object.
    if isinstance(texts, str) or isinstance(texts[0], int):
        return answers[0]
    return answers


def _typed(
    inputs: list[Encoded],
    types: list[int | list[int]],
    num_types: int,
) -> list[Encoded]:
    """The inputs with the segment types of their tokens, below `num_types`. Raises `ApiError`."""
    param = "token_type_ids"
    flat: list[int] = []
    lists: list[list[int]] = []
    for item in types:
        if isinstance(item, int):
            flat.append(item)
        else:
            lists.append(item)
    if not lists:
        lists = [flat]  # a single input
    if len(lists) != len(inputs):
        message = (
            f"{param} has the length {len(lists):,}; {len(inputs):,} is expected, a list for "
            "each input"
        )
        raise ApiError(400, message, param=param)
    for own_types in lists:
        for kind in own_types:
            if not 0 <= kind < num_types:
                message = f"{param} has {kind}; 0 to {num_types - 1} are allowed"
                raise ApiError(400, message, param=param)
    typed = []
    for index, (tokens, own_types) in enumerate(zip(inputs, lists, strict=True)):
        num_tokens = len(tokens.ids)
        if num_tokens != len(own_types):
            message = (
                f"{param}[{index}] has the length {len(own_types):,}; {num_tokens:,} is "
                "expected, an entry for each token"
            )
            raise ApiError(400, message, param=param)
        typed.append(Encoded(tokens.ids, own_types))
    return typed


ROUTES = (
    post("/v1/embeddings", embeddings, "Vectors of texts", EmbeddingRequest),
    post("/encode", encode, "Vectors of texts (SGLang)", EncodeRequest),
    post("/api/embed", ollama_embed, "Vectors of texts (Ollama)", OllamaEmbedRequest),
    post(
        "/api/embeddings",
        ollama_embeddings,
        "The vector of a text (Ollama, older)",
        OllamaEmbeddingsRequest,
    ),
)

"""Classification of texts: `/v1/classify` and `/classify`.

In the forms of vLLM (`input`) and SGLang (`text`). This module does not know how scores are
computed.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from weft.client.generation import Delta
from weft.json_types import JsonObject
from weft.messages.requests import PoolingParams
from weft.server.body import read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.model_names import answering_name
from weft.server.operation import post
from weft.server.pooling.embeddings import native, text_or_ids
from weft.server.pooling.inputs import (
    Vector,
    answer,
    encoded,
    require_pools,
    require_texts,
    split,
    start,
    usage,
)
from weft.server.pooling.models import ClassifyRequest


async def classify(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, ClassifyRequest)
    pools = require_pools(context, "classify", "labels need a model with a classification head")
    has_native = body.text is not None or body.input_ids is not None
    if body.input is not None and has_native:
        message = "give input, or text, or input_ids"
        raise ApiError(400, message, param="input")
    if body.input is None:
        param = "text"
        texts = text_or_ids(body.text, body.input_ids)
    else:
        param = "input"
        texts = body.input
    parts = split(param, texts)
    require_texts(param, parts)
    inputs = await encoded(context, parts, body, param=param)
    activates = body.use_activation
    if activates is None:
        activates = body.activation
    pooling = PoolingParams(normalize=activates)
    generation = start(context, request, body, inputs, pooling)
    rid = generation.completions[0].spec.request.rid

    def make(vectors: list[Vector], deltas: list[Delta]) -> Any:
        if body.input is None:
            return native(pools, vectors, deltas, texts, rid)
        data: list[JsonObject] = []
        for index, vector in enumerate(vectors):
            found = _found(index, vector, pools.labels)
            data.append(found)
        return {
            "id": f"classify-{rid}",
            "object": "list",
            "created": int(time.time()),
            "model": answering_name(context, body.model, body.lora_path),
            "data": data,
            "usage": usage(deltas),
        }

    return answer(generation, param, make)


def _found(
    index: int,
    scores: Vector,
    labels: list[str],
) -> JsonObject:
    return {
        "index": index,
        "label": labels[int(scores.argmax())],
        "probs": scores.tolist(),
        "num_classes": len(labels),
    }


ROUTES = (
    post("/v1/classify", classify, "The labels of texts", ClassifyRequest),
    post("/classify", classify, "The labels of texts", ClassifyRequest),
)

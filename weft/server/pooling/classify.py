"""Which label a text has: `/v1/classify` and `/classify`, in the forms of vLLM (`input`) and SGLang
(`text`).
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from weft.client.generation import Delta
from weft.messages.requests import PoolingParams
from weft.server.body import read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.operation import post
from weft.server.pooling.embeddings import native, text_or_ids
from weft.server.pooling.inputs import Vector, answer, encoded, require_pools, split, start, usage
from weft.server.pooling.models import ClassifyRequest
from weft.server.submit import require_model


async def classify(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, ClassifyRequest)
    require_model(context, body.model)
    pools = require_pools(context, "classify", "labels need a model with a classification head")
    if body.input is not None and (body.text is not None or body.input_ids is not None):
        raise ApiError(400, "give input, or text, or input_ids", param="input")
    if body.input is None:
        param = "text"
        texts = text_or_ids(body.text, body.input_ids)
    else:
        param = "input"
        texts = body.input
    inputs = await encoded(context, split(param, texts), body, param=param)
    activates = body.use_activation
    if activates is None:
        activates = body.activation
    generation = start(context, request, body, inputs, PoolingParams(normalize=activates))
    rid = generation.completions[0].spec.rid

    def make(vectors: list[Vector], deltas: list[Delta]) -> Any:
        if body.input is None:
            return native(vectors, deltas, texts, rid)
        data = [_found(index, vector, pools.labels) for index, vector in enumerate(vectors)]
        return {
            "id": f"classify-{rid}",
            "object": "list",
            "created": int(time.time()),
            "model": context.info.model_name,
            "data": data,
            "usage": usage(deltas),
        }

    return answer(generation, param, make)


def _found(index: int, scores: Vector, labels: list[str]) -> dict[str, Any]:
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

"""From the inputs of a body to one generation that makes a vector or scores of each, all of them in
one message to the engine. An input that cannot be used is named by its place.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request

from weft.client.generation import Completion, Delta, Generation
from weft.client.prompt import Prompt
from weft.messages.pooling import PoolingParams
from weft.messages.replies import Pooled
from weft.messages.sampling import SamplingParams
from weft.messages.status import Pools
from weft.server.context import ServerContext, cache_salt_of, tenant_of
from weft.server.errors import ApiError, failed
from weft.server.pooling.models import PooledRequest, Side, Texts
from weft.server.stream import Answer
from weft.server.submit import request_name, submit, timeout_ms
from weft.text.tokenizer import ContextExceeded, Encoded

NO_TOKENS = SamplingParams(max_new_tokens=0)
Input = str | tuple[str, str] | list[int]  # a text, two of them as a pair, or token ids
Vector = NDArray[np.float32]


def require_pools(context: ServerContext, task: str, what: str) -> Pools:
    """What the model makes of prompts. Raises `ApiError` 400 if that is not this `task`."""
    pools = context.client.engine.pools
    if pools is not None and pools.task == task:
        return pools
    name = context.info.model_name
    if pools is not None:
        raise ApiError(400, f"{name} is made to {pools.task}; {what}", param="model")
    raise ApiError(
        400,
        f"{name} generates tokens; {what} (weft serve --task embed makes vectors with it)",
        param="model",
    )


def split(param: str, value: Texts) -> list[Input]:
    """The inputs that a field stands for: a text, ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    if set(map(type, value)) == {int}:  # there may be millions
        return [cast(list[int], value)]
    found: list[Input] = [item for item in value if not isinstance(item, int)]
    if len(found) < len(value):
        raise ApiError(400, f"{param} mixes token ids with texts or lists", param=param)
    if not found:
        raise ApiError(400, f"{param} is empty", param=param)
    return found


async def encoded(
    context: ServerContext, inputs: Sequence[Input], body: PooledRequest, *, param: str
) -> list[Encoded]:
    """The tokens of each input, cut if `body` or the server asks for it.

    Raises `ApiError` or `ContextExceeded` for what cannot be used, naming the input.
    """
    longest = context.client.engine.max_prompt_tokens
    truncate, side = body.truncate_prompt_tokens, body.truncation_side or "right"
    if truncate is None and context.config.auto_truncate:
        truncate = -1
    if truncate is not None and truncate != -1 and not 1 <= truncate <= longest:
        message = f"truncate_prompt_tokens is {truncate}; 1 to {longest:,} are allowed, or -1 for all that fit"
        raise ApiError(400, message, param="truncate_prompt_tokens")
    limit = longest if truncate == -1 else truncate
    texts = [one for one in inputs if not isinstance(one, list)]
    special = body.add_special_tokens is not False
    found = iter(
        await context.tokenizer.encode_inputs(
            texts, max_len=limit, side=side, add_special_tokens=special
        )
    )
    every = [
        Encoded(_cut(one, limit, side), []) if isinstance(one, list) else next(found)
        for one in inputs
    ]
    for place, one in enumerate(every):
        name = param if len(every) == 1 else f"{param}[{place}]"
        if not one.ids:
            raise ApiError(400, f"{name} has no token", param=param)
        if len(one.ids) > longest:
            raise ContextExceeded(
                param, f"{name} has {len(one.ids):,} tokens; at most {longest:,} are allowed"
            )
    return every


def start(
    context: ServerContext,
    request: Request,
    body: PooledRequest,
    inputs: Sequence[Encoded],
    pooling: PoolingParams,
) -> Generation:
    """Compute `pooling` of each input."""
    pools = context.client.engine.pools
    with_types = pools is not None and pools.num_token_types > 1
    rid = request_name(request, body.rid, body.request_id)
    user = (body.user or "")[: context.limits.max_user_len]
    prompts = [
        Prompt(
            ids=one.ids,
            params=NO_TOKENS,
            rid=rid,
            tenant=tenant_of(context, request, user),
            user=user,
            cache_salt=cache_salt_of(context, request),
            priority=body.priority or 0,
            timeout_ms=timeout_ms(context, request, body.timeout_ms),
            pooling=_with_types(pooling, one.types) if with_types and any(one.types) else pooling,
        )
        for one in inputs
    ]
    return submit(context, prompts, stream=False)


def dimensions(pools: Pools, asked: int | None) -> int:
    """How much of a vector is wanted; 0: all of it. Raises `ApiError`."""
    if asked is not None and not 1 <= asked <= pools.size:
        raise ApiError(
            400, f"dimensions is {asked}; 1 to {pools.size:,} are allowed", param="dimensions"
        )
    return asked or 0


class PooledReply:
    """The `Reply` to a request whose vectors `make` makes an answer of."""

    def __init__(
        self, generation: Generation, make: Callable[[list[Vector], list[Delta]], Any]
    ) -> None:
        self._generation, self._make = generation, make

    def full_body(self, deltas: Sequence[Delta]) -> bytes:
        vectors = [vector_of(completion) for completion in self._generation.completions]
        return msgspec.json.encode(self._make(vectors, list(deltas)))

    def events(self, delta: Delta) -> bytes:
        raise AssertionError("vectors are not streamed")

    def closing(self) -> bytes:
        return b""


def answer(
    generation: Generation,
    param: str,
    make: Callable[[list[Vector], list[Delta]], Any],
    *,
    first: int = 0,
) -> Answer:
    """The answer that `make` makes of the vectors; a failure names the input of `param`, which
    begin at `first`.
    """

    def failure(deltas: Sequence[Delta]) -> ApiError | None:
        for delta in deltas:
            end, place = delta.end, delta.choice - first
            name = f"{param}[{place}]: " if len(deltas) > 1 and place >= 0 else ""
            if end is not None and end.failed:
                return failed(end.status, name + end.message, end.retry_after_s)
            if end is not None and end.reason == "abort":
                return failed(503, name + end.message)
        return None

    return Answer(generation, PooledReply(generation, make), failure=failure)


def vector_of(completion: Completion) -> Vector:
    """What was made of its prompt."""
    [vector] = [extra.vector for extra in completion.given if isinstance(extra, Pooled)]
    return np.frombuffer(vector, dtype="<f4")


def written(vector: Vector, encoding: str | None) -> list[float] | str:
    """As the API has it: numbers, or base64 of little-endian float32."""
    return base64.b64encode(vector.tobytes()).decode() if encoding == "base64" else vector.tolist()


def usage(deltas: Sequence[Delta]) -> dict[str, int]:
    num = sum(delta.end.prompt_tokens for delta in deltas if delta.end is not None)
    return {"prompt_tokens": num, "total_tokens": num}


def _cut(ids: list[int], limit: int | None, side: Side) -> list[int]:
    if limit is None or len(ids) <= limit:
        return ids
    return ids[:limit] if side == "right" else ids[-limit:]


def _with_types(pooling: PoolingParams, types: Sequence[int]) -> PoolingParams:
    return msgspec.structs.replace(pooling, token_type_ids=bytes(types))

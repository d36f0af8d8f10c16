"""Turns the inputs of a body into one generation that makes a vector or scores of each.

All inputs go to the engine in one message. Errors name an invalid input by its index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request

from weft.client.generation import Completion, Delta, Generation
from weft.client.requests import pack_ids
from weft.messages.media import MediaItem
from weft.messages.replies import PooledPiece
from weft.messages.requests import PoolingParams
from weft.messages.sampling import SamplingParams
from weft.messages.status import Pools
from weft.server.context import ServerContext
from weft.server.errors import ApiError, failed
from weft.server.fields.engine import want_engine_of
from weft.server.limits import check_size
from weft.server.model_names import adapter_of
from weft.server.pooling.models import PooledRequest, Side, Texts
from weft.server.requests import (
    common_request,
    request_name,
    sharing_of,
    submit,
)
from weft.server.stream import Answer
from weft.text.tokenizer import ContextExceeded, Encoded

NO_TOKENS = SamplingParams(max_new_tokens=0)
Input = str | tuple[str, str] | list[int]  # a text, a pair of texts, or token ids
Vector = NDArray[np.float32]
# Makes an API's answer from the vectors and their deltas.
MakeAnswer = Callable[[list[Vector], list[Delta]], Any]


def require_pools(context: ServerContext, task: str, what: str) -> Pools:
    """The pooling of the model. Raises `ApiError` 400 if its task is not `task`."""
    pools = context.client.engine.pools
    if pools is not None and pools.task == task:
        return pools
    name = context.info.model_name
    if pools is not None:
        message = f"{name} is made to {pools.task}; {what}"
        raise ApiError(400, message, param="model")
    message = f"{name} generates tokens; {what} (weft serve --task embed makes vectors with it)"
    raise ApiError(400, message, param="model")


# ---- tokens


def split(param: str, value: Texts) -> list[Input]:
    """The inputs in a field: a text, ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    if set(map(type, value)) == {int}:  # may have millions of entries
        return [cast(list[int], value)]
    found: list[Input] = [item for item in value if not isinstance(item, int)]
    if len(found) < len(value):
        message = f"{param} mixes token ids with texts or lists"
        raise ApiError(400, message, param=param)
    if not found:
        message = f"{param} is empty; 1 text or more is needed, or token ids"
        raise ApiError(400, message, param=param)
    return found


def require_texts(param: str, inputs: Sequence[Input]) -> None:
    """Raise `ApiError` for an input that is an empty text, as OpenAI's API does.

    Many models would make a vector of their special tokens alone.
    """
    for index, one in enumerate(inputs):
        if one == "":
            name = f"{param}[{index}]" if len(inputs) > 1 else param
            message = f"{name} is an empty text; 1 character or more is needed"
            raise ApiError(400, message, param=param)


async def encoded(
    context: ServerContext,
    inputs: Sequence[Input],
    body: PooledRequest,
    *,
    param: str,
    names: Sequence[str] = (),
    is_uncut: bool = False,
) -> list[Encoded]:
    """The tokens of each input, truncated if `body` or the server asks for it, and never if
    `is_uncut`.

    `names`: the name of each input in the request; by default its index in `param`.

    Raises `ApiError` or `ContextExceeded`, which name the invalid input.
    """
    limit = None
    if not is_uncut:
        limit = _most_tokens(context, body)
    side = body.truncation_side or "right"
    # All texts go to the library in one call, which uses its threads; inputs of ids are inserted
    # afterwards.
    texts = [text for text in inputs if not isinstance(text, list)]
    special = body.add_special_tokens is not False
    found = iter(
        await context.tokenizer.encode_inputs(
            texts,
            max_len=limit,
            side=side,
            add_special_tokens=special,
        )
    )
    every: list[Encoded] = []
    for one in inputs:
        if isinstance(one, list):
            ids = _cut(one, limit, side)
            every.append(Encoded(ids, types=[]))
        else:
            every.append(next(found))
    require_lengths(context, every, param, names)
    return every


def require_lengths(
    context: ServerContext, inputs: Sequence[Encoded], param: str, names: Sequence[str] = ()
) -> None:
    """Raise `ApiError` for an input without tokens, and `ContextExceeded` for an input that is too
    long."""
    longest = context.client.engine.max_prompt_tokens
    for index, tokens in enumerate(inputs):
        name = param
        if names:
            name = names[index]
        elif len(inputs) > 1:
            name = f"{param}[{index}]"
        field = name.partition("[")[0]
        if not tokens.ids:
            message = f"{name} has no token; 1 or more are needed"
            raise ApiError(400, message, param=field)
        if len(tokens.ids) > longest:
            message = f"{name} has {len(tokens.ids):,} tokens; at most {longest:,} are allowed"
            raise ContextExceeded(field, message)


def cut_to_limit(context: ServerContext, body: PooledRequest, ids: list[int]) -> list[int]:
    """`ids`, truncated if `body` or the server asks for it. Raises `ApiError`."""
    return _cut(ids, _most_tokens(context, body), body.truncation_side or "right")


def _most_tokens(
    context: ServerContext,
    body: PooledRequest,
) -> int | None:
    """The number of tokens to which an input is truncated; None: it is not truncated. Raises
    `ApiError`."""
    longest = context.client.engine.max_prompt_tokens
    most = body.truncate_prompt_tokens
    if most is None and context.config.auto_truncate:
        most = -1
    if most == -1:
        return longest
    if most is not None and not 1 <= most <= longest:
        message = (
            f"truncate_prompt_tokens is {most}; "
            f"1 to {longest:,} are allowed, or -1 for all that fit"
        )
        raise ApiError(400, message, param="truncate_prompt_tokens")
    return most


def _cut(
    ids: list[int],
    limit: int | None,
    side: Side,
) -> list[int]:
    if limit is None or len(ids) <= limit:
        return ids
    if side == "right":
        return ids[:limit]
    return ids[-limit:]


# ---- the generation


def start(
    context: ServerContext,
    request: Request,
    body: PooledRequest,
    inputs: Sequence[Encoded],
    pooling: PoolingParams,
    media: Sequence[tuple[MediaItem, ...]] = (),
) -> Generation:
    """Compute `pooling` for each input. `media`: images, videos and sounds of each input, or empty
    if no input has any."""
    pools = context.client.engine.pools
    with_types = pools is not None and pools.num_token_types > 1
    user = (body.user or "")[: context.limits.max_user_len]
    adapter = adapter_of(context, body.model, body.lora_path)
    if body.routed_dp_rank is not None or body.data_parallel_rank is not None:
        want_engine_of(body, context.config.dp_size)
    check_size(context, [len(tokens.ids) for tokens in inputs], [1] * len(inputs))
    vocab_size = context.client.engine.vocab_size
    common = common_request(
        context,
        request,
        body,
        NO_TOKENS,
        rid=request_name(request, body.rid, body.request_id),
        sharing=sharing_of(
            context,
            request,
            user=user,
            salt=body.cache_salt,
            extra_key=body.extra_key,
        ),
    )
    requests = []
    for index, tokens in enumerate(inputs):
        own_pooling = pooling
        if with_types and any(tokens.types):
            types = bytes(tokens.types)
            own_pooling = msgspec.structs.replace(pooling, token_type_ids=types)
        one = msgspec.structs.replace(
            common,
            input_ids=pack_ids(tokens.ids, vocab_size),
            user=user,
            adapter=adapter,
            pooling=own_pooling,
            media=media[index] if media else (),
        )
        requests.append(one)
    return submit(context, requests, stream=False)


def dimensions(pools: Pools, asked: int | None) -> int:
    """Dimensions of a vector to keep; 0 keeps all. Raises `ApiError`."""
    if asked is not None and pools.form != "vector":
        message = f"dimensions is {asked}; what this model makes cannot be cut"
        raise ApiError(400, message, param="dimensions")
    if asked is not None and not 1 <= asked <= pools.size:
        message = f"dimensions is {asked}; 1 to {pools.size:,} are allowed"
        raise ApiError(400, message, param="dimensions")
    return asked or 0


# ---- the answer


class PooledReply:
    """The `Reply` to a request; `make` makes its answer from the vectors."""

    def __init__(self, generation: Generation, make: MakeAnswer) -> None:
        self._generation = generation
        self._make = make

    def full_body(self, deltas: Sequence[Delta]) -> bytes:
        vectors = [vector_of(completion) for completion in self._generation.completions]
        body = self._make(vectors, list(deltas))
        return msgspec.json.encode(body)

    def events(self, delta: Delta) -> bytes:
        raise AssertionError("vectors are not streamed")

    def closing(self) -> bytes:
        return b""


def answer(
    generation: Generation,
    param: str,
    make: MakeAnswer,
    *,
    first: int = 0,
) -> Answer:
    """The answer that `make` makes from the vectors.

    The message of a failure names the input of `param`; its first input has the index `first` among
    the completions.
    """

    def failure(deltas: Sequence[Delta]) -> ApiError | None:
        for delta in deltas:
            end = delta.end
            if end is None:
                continue
            index = delta.choice - first
            name = ""
            if len(deltas) > 1 and index >= 0:
                name = f"{param}[{index}]: "
            if end.failed:
                return failed(end.status, name + end.message, end.retry_after_s)
            if end.reason == "abort":
                return failed(503, name + end.message)
        return None

    return Answer(
        generation,
        PooledReply(generation, make),
        failure=failure,
    )


def vector_of(completion: Completion) -> Vector:
    """float32 [size]: the vector or the scores of a completion's prompt."""
    for output in completion.aux_outputs:
        if isinstance(output, PooledPiece):
            return np.frombuffer(output.vector, dtype="<f4")
    id = completion.spec.request.id
    raise AssertionError(f"completion {id} has ended well, but has no vector")


def usage(deltas: Sequence[Delta]) -> dict[str, int]:
    num = 0
    for delta in deltas:
        if delta.end is not None:
            num += delta.end.prompt_tokens
    return {"prompt_tokens": num, "total_tokens": num}

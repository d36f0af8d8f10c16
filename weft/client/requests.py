"""Requests on their way to the engine: checked, numbered, and packed into messages.

The server, or `weft.LLM`, makes each request once. The engine refuses the same faults; here they
are refused before anything is sent, with a message that names the user's field. This module knows
nothing of HTTP or of replies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from weft.client.prompt import PARAM, to_token_params
from weft.config.numbers import counted
from weft.messages.media import MediaItem
from weft.messages.requests import BatchGenerate, GenerateRequest
from weft.messages.sampling import InvalidParam, SamplingParams, check_number, check_token_ids
from weft.messages.status import EngineReady, Stats
from weft.text.tokenizer import ContextExceeded, Tokenizer

SMALLEST_TOP_P = 1e-6


def pack_ids(ids: Sequence[int], vocab_size: int) -> bytes:
    """int32 [n], packed. Raises `InvalidParam` for an id outside of the vocabulary."""
    if len(ids) == 0:
        return b""
    try:
        wide = np.asarray(ids)
    except (ValueError, OverflowError):  # nested lists, or an integer too large for numpy
        wide = np.empty(0)
    is_right = wide.dtype.kind in "iu"
    if is_right:
        is_right = int(wide.min()) >= 0 and int(wide.max()) < vocab_size
    if not is_right:
        check_token_ids("prompt", ids, vocab_size)  # names the first wrong id
    return wide.astype(np.int32).tobytes()


def unpack_ids(packed: bytes) -> memoryview[int]:
    """The ids that `pack_ids` has packed, as a sequence of integers [n]."""
    return memoryview(packed).cast("i")


def checked(
    request: GenerateRequest,
    engine: EngineReady,
    tokenizer: Tokenizer,
    *,
    clamps: bool,
    valid: SamplingParams | None = None,
    stats: Stats | None = None,
) -> GenerateRequest:
    """The request with its length resolved and with words turned into tokens.

    `valid`: parameters that were checked before, which are not checked again. `stats`: the latest
    numbers of the engine, for the error of a prompt that does not fit its memory.

    `clamps` cuts a `max_new_tokens` beyond the context instead of refusing it. Raises
    `InvalidParam`.
    """
    asked = request.sampling
    if asked is not valid:
        asked.check(engine.vocab_size)
    params = asked
    if params.top_p == 0:  # means the likeliest token: no other is within so little probability
        params = replace(params, top_p=SMALLEST_TOP_P)
    # A plain request sets none of these fields, and skips their checks.
    if engine.pools is not None:
        check_task(params, engine)
    if request.priority:
        check_number("priority", "priority", request.priority)
    if request.pooling is not None:
        request.pooling.check(engine.vocab_size)
    if params.hidden_states is not None or request.vectors:
        _check_vectors_and_states(request, engine)
    if request.media:
        _check_media(request)
    max_new_tokens = _resolve_length(request, engine, stats, clamps=clamps)
    if max_new_tokens != params.max_new_tokens:
        params = replace(params, max_new_tokens=max_new_tokens)
    if params.bad_words or params.thinking_budget is not None:
        params = to_token_params(params, tokenizer)
    changes: dict[str, Any] = {}
    if params is not asked:
        params.check(engine.vocab_size)  # checks min_new_tokens against the resolved length
        changes["sampling"] = params
    recompute_from = params.recompute_from
    if recompute_from is not None:
        changes["recompute_from"] = recompute_from
    if request.vectors:
        changes["shares_kv"] = False
    return replace(request, **changes) if changes else request


def numbered(request: GenerateRequest, numbers: Iterator[int]) -> list[GenerateRequest]:
    """The request for each of its n completions, with ids from `numbers`.

    A given seed is increased by one for each, so that the outputs differ.
    """
    if request.sampling.n == 1:
        return [replace(request, id=next(numbers))]
    sampling = replace(request.sampling, n=1)
    requests = [replace(request, id=next(numbers), sampling=sampling)]
    for index in range(1, request.sampling.n):
        if request.sampling.seed is not None:
            seed = (request.sampling.seed + index + 2**63) % 2**64 - 2**63  # stays within 64 bits
            sampling = replace(sampling, seed=seed)
        requests.append(replace(request, id=next(numbers), sampling=sampling))
    return requests


def without_prompt(request: GenerateRequest, id: int) -> GenerateRequest:
    """The request under the number `id`, without the large part of it."""
    return replace(request, id=id, input_ids=b"", vectors=b"", media=())


def media_bytes(request: GenerateRequest) -> int:
    """Of the values of its pictures, videos and sounds."""
    return sum(len(item.values) for item in request.media)


def batch_requests(requests: Sequence[GenerateRequest]) -> BatchGenerate:
    """Several requests as one message; it holds equal prompts only once."""
    indices: dict[tuple[bytes, bytes, tuple[bytes, ...]], int] = {}
    prompt_of: list[int] = []
    without_prompts: list[GenerateRequest] = []
    media_of: dict[int, tuple[MediaItem, ...]] = {}
    for request in requests:
        digests: tuple[bytes, ...] = ()
        if request.media:  # compare media by name, because the values are large
            digests = tuple(item.digest for item in request.media)
        index = indices.setdefault((request.input_ids, request.vectors, digests), len(indices))
        if request.media:
            media_of[index] = request.media
        prompt_of.append(index)
        without_prompts.append(without_prompt(request, request.id))
    return BatchGenerate(
        prompts=[ids for ids, _, _ in indices],
        vectors={index: vectors for (_, vectors, _), index in indices.items() if vectors},
        media=media_of,
        requests=without_prompts,
        prompt_of=prompt_of,
    )


def _resolve_length(
    request: GenerateRequest, engine: EngineReady, stats: Stats | None, *, clamps: bool
) -> int | None:
    """The largest number of tokens to generate; None if the engine must compute it."""
    prompt_len = request.prompt_len
    if prompt_len == 0:
        raise InvalidParam("prompt", "the prompt is empty; it must have at least 1 token")
    max_new_tokens = request.sampling.max_new_tokens
    generates = max_new_tokens != 0
    context = engine.context_length
    if prompt_len + generates > context:
        raise ContextExceeded(
            "prompt",
            f"the prompt has {_described_len(request)}; "
            f"the context of {counted(context, 'token')} leaves no room for it",
        )
    if prompt_len > engine.max_prompt_tokens + (not generates):
        raise ContextExceeded(
            "prompt",
            f"the prompt has {_described_len(request)}; "
            f"at most {engine.max_prompt_tokens:,} fit the KV cache{_now_there(stats)}; "
            "shorten it, or raise --kv-tokens of the server",
        )
    if max_new_tokens is None:
        if request.session is not None:
            return None  # only the engine knows the length of the session's history
        return max(context - prompt_len, 1)
    if prompt_len + max_new_tokens <= context:
        return max_new_tokens
    if clamps:
        return context - prompt_len
    raise ContextExceeded(
        "max_tokens",
        f"the prompt has {_described_len(request)} and max_tokens is {max_new_tokens:,}; "
        f"together they exceed the context of {context:,} tokens; "
        f"lower max_tokens to {context - prompt_len:,} at most",
    )


def _now_there(stats: Stats | None) -> str:
    """What is in the KV cache now, in words."""
    if stats is None or not stats.kv_tokens:
        return ""
    evictable = stats.kv_evictable + stats.kv_held
    free = stats.kv_tokens - stats.kv_used - evictable
    return f", of which now {free:,} are free and {evictable:,} can be evicted"


def _described_len(request: GenerateRequest) -> str:
    """The length of a prompt, as text for messages."""
    text = counted(request.prompt_len, "token")
    if request.media:
        num_media = sum(item.length for item in request.media)
        text += f" ({num_media:,} of them stand for images, videos or sounds)"
    return text


# ---- what this engine supports


def check_task(params: SamplingParams, engine: EngineReady) -> None:
    """Raise `InvalidParam` if the request wants tokens of a model that generates none.

    The engine would refuse it, too, but only after errors about lengths, which would mislead.
    """
    if engine.pools is None or params.max_new_tokens == 0:
        return
    makes = "scores of labels (POST /v1/classify)"
    if engine.pools.task == "embed":
        makes = "vectors (POST /v1/embeddings)"
    raise InvalidParam("model", f"this model generates no tokens; it makes {makes}")


def _check_vectors_and_states(request: GenerateRequest, engine: EngineReady) -> None:
    """Raise `InvalidParam` for options that do not go together or that this engine lacks."""
    wanted = request.sampling.hidden_states
    if wanted is not None and not engine.gives_hidden_states:
        raise InvalidParam(
            "return_hidden_states",
            "this server returns no hidden states; start it with --enable-return-hidden-states",
        )
    if wanted == "all" and request.session is not None:
        raise InvalidParam(
            "return_hidden_states", "hidden states of a session's history cannot be returned"
        )
    if request.vectors and request.session is not None:
        raise InvalidParam(
            PARAM, f"{PARAM} and session_params exclude each other: a session remembers token ids"
        )
    if request.vectors and request.sampling.prompt_logprobs is not None:
        raise InvalidParam(
            PARAM, f"{PARAM} has no log probabilities of the prompt: its tokens have no ids"
        )


def _check_media(request: GenerateRequest) -> None:
    """Raise `InvalidParam` for options that do not go together with pictures, videos or sounds."""
    if request.session is not None:
        raise InvalidParam(
            "session_params",
            "session_params and images, videos and sounds exclude each other: "
            "a session remembers token ids",
        )
    if request.vectors:
        raise InvalidParam(
            PARAM, f"{PARAM} and images, videos and sounds exclude each other: both are vectors"
        )

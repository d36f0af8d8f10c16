"""Requests that are refused on arrival, because they could never run. (The queue's limits are in
`queue.py`.)"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.config.numbers import MAX_LABEL_IDS, NUMBERS
from weft.messages.requests import GenerateRequest, PoolingParams
from weft.scheduler.settings import PoolingLimits, SchedulerSettings


class Refusal(NamedTuple):
    message: str
    status: int  # as an HTTP status


QUEUE_IS_FULL = Refusal("The request queue is full.", 503)


def refusal(
    message: GenerateRequest, settings: SchedulerSettings, *, max_len: int
) -> Refusal | None:
    """Why a request cannot be taken. `max_len`: prompt and output together, in tokens."""
    vocab_size = settings.vocab_size
    prompt = np.frombuffer(message.input_ids[: len(message.input_ids) // 4 * 4], dtype=np.int32)
    if not len(prompt):
        return Refusal("the prompt is empty", 400)
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        return Refusal(f"the prompt has token id {bad}; 0 to {vocab_size - 1:,} are allowed", 400)
    new = 1 if message.sampling.max_new_tokens is None else message.sampling.max_new_tokens
    if len(prompt) + new > max_len:
        return Refusal(
            f"the prompt has {len(prompt):,} tokens and {new:,} are to be generated; "
            f"together at most {max_len:,} fit",
            400,
        )
    why_not = _out_of_range(message) or _misuse(message, settings)
    return None if why_not is None else Refusal(why_not, 400)


def _out_of_range(message: GenerateRequest) -> str:
    """Why a number of the request fits no column of the scheduler; empty if all fit.

    The front checks the same ranges before, so a client usually hears of it there.
    """
    sampling = message.sampling
    for name, value in (
        ("priority", message.priority),
        ("top_k", sampling.top_k),
        ("seed", sampling.seed),
    ):
        if value is not None and (wrong := NUMBERS[name].wrong(name, value)):
            return wrong
    return ""


def _misuse(message: GenerateRequest, settings: SchedulerSettings) -> str | None:
    """Why the model cannot give what the request asks for; None if it can.

    A model may generate no tokens, make no vectors, or make vectors of another form.
    """
    limits, asked = settings.pooling, message.pooling
    wants_tokens = message.sampling.max_new_tokens != 0
    if limits is not None and wants_tokens:
        gives = (
            "vectors (POST /v1/embeddings)"
            if limits.is_embedding
            else "scores of labels (POST /v1/classify)"
        )
        return f"this model generates no tokens; it makes {gives}"
    if limits is not None and (message.vectors or _wants_states(message)):
        return (
            "this model serves neither input embeddings nor hidden states "
            "nor log probabilities of prompts"
        )
    if asked is None:
        return None
    if wants_tokens:
        return "tokens are asked for together with a vector of the prompt; max_new_tokens must be 0"
    if asked.label_ids:
        bad = [label for label in asked.label_ids if not 0 <= label < settings.vocab_size]
        if limits is None and not bad and len(asked.label_ids) <= MAX_LABEL_IDS:
            return None
        if limits is not None:
            return "label tokens are for a model that generates; this one does not"
        if bad:
            highest = settings.vocab_size - 1
            return f"label_token_ids has token id {bad[0]}; 0 to {highest:,} are allowed"
        num_ids = len(asked.label_ids)
        return f"label_token_ids has {num_ids:,} ids; at most {MAX_LABEL_IDS:,} are allowed"
    if limits is None:
        return (
            "this model generates tokens; "
            "it makes vectors if the server is started with --task embed"
        )
    return _form(message, asked, limits)


def _wants_states(message: GenerateRequest) -> bool:
    return (
        message.sampling.prompt_logprobs is not None or message.sampling.hidden_states is not None
    )


def _form(message: GenerateRequest, asked: PoolingParams, limits: PoolingLimits) -> str | None:
    if asked.dimensions and not (limits.is_embedding and 0 < asked.dimensions <= limits.size):
        allowed = (
            f"1 to {limits.size:,} are allowed"
            if limits.is_embedding
            else "this model makes no vectors"
        )
        return f"dimensions is {asked.dimensions}; {allowed}"
    types = asked.token_type_ids
    if types and not limits.num_token_types:
        return "token_type_ids are given, but this model knows no kinds of segments"
    if types and len(types) * 4 != len(message.input_ids):
        return f"there are {len(types):,} token_type_ids for {len(message.input_ids) // 4:,} tokens"
    if types and max(types) >= limits.num_token_types:
        return f"token_type_ids has {max(types)}; 0 to {limits.num_token_types - 1} are allowed"
    return None

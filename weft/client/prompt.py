"""What a request asks of the engine, and whether this engine can do it: prompts, their checks, and words as tokens.

Knows nothing of HTTP, nor of what comes back. The engine refuses the same things; here they are refused before anything
is sent, with the message that names the user's field.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from msgspec.structs import replace

from weft.messages.pooling import PoolingParams
from weft.messages.sampling import InvalidParam, SamplingParams, ThinkingMarks
from weft.messages.sessions import SessionParams
from weft.messages.status import EngineReady
from weft.text.parsers.formats import ReasoningFormat
from weft.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt to complete `params.n` times. `rid` is a name for logs and aborts; it need not be unique. `group` is
    a second name, shared by the prompts of a batch: aborting it aborts them all."""

    ids: Sequence[int]
    params: SamplingParams
    rid: str
    group: str = ""
    tenant: str = ""  # whom the policy "fair" serves with it
    user: str = ""
    priority: int = 0
    cache_salt: str = ""
    timeout_ms: int = 0  # the engine ends it after so long; 0: never
    session: SessionParams | None = None  # it comes behind the history of this session
    vectors: bytes = b""  # float32 [len(ids), hidden size], packed: they stand for the tokens, whose ids mean nothing
    pooling: PoolingParams | None = None  # no tokens are wanted, but this
    stream_interval: int = 1  # tokens of a completion that are told together, but for the first


def check_task(params: SamplingParams, engine: EngineReady) -> None:
    """Raise `InvalidParam` if tokens are asked of a model that generates none. The engine would refuse them, too, but
    behind errors about lengths that have nothing to do with it."""
    if engine.pools is None or params.max_new_tokens == 0:
        return
    gives = (
        "vectors (POST /v1/embeddings)"
        if engine.pools.task == "embed"
        else "scores of labels (POST /v1/classify)"
    )
    raise InvalidParam("model", f"this model generates no tokens; it makes {gives}")


TAIL_LEN = 32  # tokens at the end of a prompt in which a template can open the reasoning


def to_token_params(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """`params` with the tokens of its bad words. Raises InvalidParam for a budget of reasoning without its marks."""
    if params.thinking_budget is not None and params.thinking_marks is None:
        raise InvalidParam(
            "thinking_budget",
            "it is not known how this model marks its reasoning, so it has no budget",
        )
    if not params.bad_words:
        return params
    return replace(
        params, bad_word_ids=params.bad_word_ids + bad_word_ids(tokenizer, params.bad_words)
    )


@lru_cache(maxsize=16)
def bad_word_ids(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word at the beginning of a text and behind a space; where these are the same, once.

    A word can still be said in other tokens than those that the tokenizer makes of it.
    """
    texts = [prefix + word.lstrip(" ") for word in words for prefix in ("", " ")]
    encoded = tokenizer.encode_all(texts, add_special_tokens=False)
    return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))


def with_reasoning_marks(
    params: SamplingParams,
    format: ReasoningFormat | None,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
) -> SamplingParams:
    """`params` with the marks of the model's reasoning, if they have a budget. `prompt`: token ids."""
    if params.thinking_budget is None or format is None:
        return params
    if (
        params.grammar is not None
    ):  # it knows the marks, or holds from the first token on: then there is no reasoning
        marks = params.grammar.behind
        return replace(
            params,
            thinking_budget=None if marks is None else params.thinking_budget,
            thinking_marks=marks,
        )
    prompt_end = tokenizer.decode(list(prompt[-TAIL_LEN:]), skip_special_tokens=False)
    begin, end = tokenizer.encode_all([format.begin, format.end], add_special_tokens=False)
    return replace(
        params, thinking_marks=ThinkingMarks(tuple(begin), tuple(end), format.is_open(prompt_end))
    )


PARAM = "input_embeds"
# What is rounded to the nearest number of a type and is this large or larger becomes infinite there.
INFINITE_FROM = {"bfloat16": (2 - 2**-8) * 2.0**127, "float16": 65_520.0}
PLACEHOLDER = 0  # the id of every token of such a prompt


def pack_input_embeds(values: Any, engine: EngineReady) -> bytes:
    """float32 [n, hidden size], packed: from nested lists or an array, or from base64 of just that (little-endian).

    Raises `InvalidParam` for another shape, and for the first value that is not finite as the model computes with it.
    """
    size = engine.hidden_size
    rows = _decoded(values, size) if isinstance(values, str) else _of_numbers(values)
    if rows.ndim != 2 or rows.shape[1] != size or not len(rows):
        raise InvalidParam(
            PARAM, f"{PARAM} has the shape {list(rows.shape)}; [tokens, {size:,}] is needed"
        )
    limit = INFINITE_FROM.get(engine.dtype, np.inf)
    finite = np.abs(rows) < limit  # false for NaN, too
    if not finite.all():
        token, place = np.argwhere(~finite)[0].tolist()
        value = rows[token, place]
        allowed = (
            "finite numbers are allowed"
            if np.isinf(limit)
            else f"numbers nearer to 0 than {limit:g} are allowed"
        )
        message = (
            f"{PARAM}[{token}][{place}] is {value}; the model computes in {engine.dtype}: {allowed}"
        )
        raise InvalidParam(PARAM, message)
    return np.ascontiguousarray(rows, dtype="<f4").tobytes()


def placeholder_ids(vectors: bytes, engine: EngineReady) -> list[int]:
    """The ids of a prompt that consists of `vectors`."""
    return [PLACEHOLDER] * (len(vectors) // (4 * engine.hidden_size))


def check_extras(
    params: SamplingParams, engine: EngineReady, *, has_vectors: bool, has_session: bool
) -> None:
    """Raise `InvalidParam` for what does not go together, or not with this engine."""
    if params.hidden_states is not None and not engine.gives_hidden_states:
        raise InvalidParam(
            "return_hidden_states",
            "this server gives no hidden states; it would if started with --enable-return-hidden-states",
        )
    if params.hidden_states == "all" and has_session:
        raise InvalidParam(
            "return_hidden_states", "hidden states of a session's history cannot be returned"
        )
    if has_vectors and has_session:
        raise InvalidParam(
            PARAM, f"{PARAM} and session_params exclude each other: a session remembers token ids"
        )
    if has_vectors and params.prompt_logprobs is not None:
        raise InvalidParam(
            PARAM, f"{PARAM} has no log probabilities of the prompt: its tokens have no ids"
        )


def _decoded(text: str, size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InvalidParam(PARAM, f"{PARAM} is a text, but no base64: {exc}") from exc
    if len(raw) % (4 * size):
        raise InvalidParam(
            PARAM,
            f"{PARAM} has {len(raw):,} bytes; {size:,} float32 for each token are a multiple of {4 * size:,}",
        )
    return np.frombuffer(raw, dtype="<f4").reshape(-1, size)


def _of_numbers(values: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    try:
        with np.errstate(over="ignore"):  # infinite then, which is found out
            return np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError, OverflowError) as exc:
        raise InvalidParam(PARAM, f"{PARAM} is no list of equally long lists of numbers") from exc

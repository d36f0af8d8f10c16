"""From a prompt to requests that the engine can take: the checks, and words turned into tokens.

The engine refuses the same faults. Here they are refused before anything is sent, with a message
that names the user's field. This module knows nothing of HTTP or of replies.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from weft.config.numbers import counted
from weft.messages.handoff import HandoffParams
from weft.messages.media import MediaItem
from weft.messages.pins import PinMark
from weft.messages.requests import BatchGenerate, GenerateRequest, PoolingParams
from weft.messages.sampling import (
    InvalidParam,
    SamplingParams,
    ThinkingMarks,
    check_number,
    check_token_ids,
)
from weft.messages.sessions import SessionParams
from weft.messages.status import EngineReady
from weft.text.parsers.formats import ReasoningFormat
from weft.text.parsers.output import Parser
from weft.text.tokenizer import ContextExceeded, Tokenizer

TAIL_LEN = 32  # tokens at the end of a prompt in which a template can open the reasoning
PARAM = "input_embeds"
# A number of this size or larger becomes infinite when it is rounded to the type.
INFINITE_FROM = {"bfloat16": (2 - 2**-8) * 2.0**127, "float16": 65_520.0}
SMALLEST_TOP_P = 1e-6
PLACEHOLDER = 0  # the id of every token of a prompt that consists of input embeddings


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt to complete `params.n` times.

    `rid` is a name for logs and aborts; it need not be unique. `group` is a second name, shared by
    the prompts of a batch: aborting it aborts them all.
    """

    ids: Sequence[int]
    params: SamplingParams
    rid: str
    group: str = ""
    tenant: str = ""  # the policy "fair" shares the engine between tenants
    user: str = ""
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""  # uid of the prompt's adapter; empty: none
    # ms; the request is refused if its first token cannot come in this time; 0: no limit
    ttft_ms: int = 0
    timeout_ms: int = 0  # ms; the engine ends the request after this time; 0: no limit
    session: SessionParams | None = None  # the prompt is appended to the history of this session
    # Packed float32 [len(ids), hidden size]: input embeddings; then the ids have no meaning.
    vectors: bytes = b""
    media: tuple[MediaItem, ...] = ()  # pictures, videos and sounds; `ids` have their placeholders
    pooling: PoolingParams | None = None  # the request wants vectors or scores instead of tokens
    handoff: HandoffParams | None = None  # another server takes part in the request
    prediction: Sequence[int] = ()  # token ids that the output is expected to resemble
    pins: tuple[PinMark, ...] = ()  # prefixes that stay cached, the shortest first
    tells_cache: bool = False  # the end tells where the cached tokens were
    stream_interval: int = 1  # tokens of a completion in one delta, except the first
    # A new parser of the reasoning before the answer, if stop strings end only the answer.
    reasoning: Callable[[], Parser] | None = None


# ---- from a prompt to requests


def make_requests(
    prompt: Prompt,
    engine: EngineReady,
    tokenizer: Tokenizer,
    numbers: Iterator[int],
    *,
    clamps: bool,
) -> list[GenerateRequest]:
    """The n requests of one prompt, with ids from `numbers`.

    `clamps` cuts a `max_new_tokens` beyond the context instead of refusing it. A given seed is
    increased by one for each request, so that the outputs differ. Raises `InvalidParam`.
    """
    params = _check(prompt, engine, tokenizer, clamps=clamps)
    sampling = params
    if params.n != 1:
        sampling = replace(params, n=1)
    first = GenerateRequest(
        id=next(numbers),
        rid=prompt.rid,
        input_ids=_pack_ids(prompt.ids, engine.vocab_size),
        sampling=sampling,
        tenant=prompt.tenant,
        user=prompt.user,
        priority=prompt.priority,
        group=prompt.group,
        cache_salt=prompt.cache_salt,
        ttft_ms=prompt.ttft_ms,
        timeout_ms=prompt.timeout_ms,
        session=prompt.session,
        recompute_from=params.recompute_from,
        vectors=prompt.vectors,
        shares_kv=not prompt.vectors,
        pooling=prompt.pooling,
        prediction=_pack_prediction(prompt, engine),
        adapter=prompt.adapter,
        media=prompt.media,
        pins=prompt.pins,
        tells_cache=prompt.tells_cache,
        handoff=prompt.handoff,
    )
    requests = [first]
    for index in range(1, params.n):
        if params.seed is not None:
            seed = (params.seed + index + 2**63) % 2**64 - 2**63  # stays within 64 bits
            sampling = replace(sampling, seed=seed)
        following = replace(first, id=next(numbers), sampling=sampling)
        requests.append(following)
    return requests


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
        without_prompts.append(replace(request, input_ids=b"", vectors=b"", media=()))
    return BatchGenerate(
        prompts=[ids for ids, _, _ in indices],
        vectors={index: vectors for (_, vectors, _), index in indices.items() if vectors},
        media=media_of,
        requests=without_prompts,
        prompt_of=prompt_of,
    )


def _check(
    prompt: Prompt,
    engine: EngineReady,
    tokenizer: Tokenizer,
    *,
    clamps: bool,
) -> SamplingParams:
    """The parameters with the length resolved and with words turned into tokens."""
    params = prompt.params
    params.check(engine.vocab_size)
    if params.top_p == 0:  # means the likeliest token: no other is within so little probability
        params = replace(params, top_p=SMALLEST_TOP_P)
    # A plain request sets none of these fields, and skips their checks.
    if engine.pools is not None:
        check_task(params, engine)
    if prompt.priority:
        check_number("priority", "priority", prompt.priority)
    if prompt.pooling is not None:
        prompt.pooling.check(engine.vocab_size)
    if params.hidden_states is not None or prompt.vectors:
        _check_vectors_and_states(prompt, engine)
    if prompt.media:
        _check_media(prompt)
    max_new_tokens = _resolve_length(prompt, engine, clamps=clamps)
    if max_new_tokens != params.max_new_tokens:
        params = replace(params, max_new_tokens=max_new_tokens)
    if params.bad_words or params.thinking_budget is not None:
        params = to_token_params(params, tokenizer)
    if params is not prompt.params:
        params.check(engine.vocab_size)  # checks min_new_tokens against the resolved length
    return params


def _resolve_length(prompt: Prompt, engine: EngineReady, *, clamps: bool) -> int | None:
    """The largest number of tokens to generate; None if the engine must compute it."""
    prompt_len = len(prompt.ids)
    if prompt_len == 0:
        raise InvalidParam("prompt", "the prompt is empty; it must have at least 1 token")
    max_new_tokens = prompt.params.max_new_tokens
    generates = max_new_tokens != 0
    context = engine.context_length
    if prompt_len + generates > context:
        raise ContextExceeded(
            "prompt",
            f"the prompt has {_told_len(prompt)}; "
            f"the context of {counted(context, 'token')} leaves no room for it",
        )
    if prompt_len > engine.max_prompt_tokens + (not generates):
        raise ContextExceeded(
            "prompt",
            f"the prompt has {_told_len(prompt)}; "
            f"at most {engine.max_prompt_tokens:,} fit the KV cache",
        )
    if max_new_tokens is None:
        if prompt.session is not None:
            return None  # only the engine knows the length of the session's history
        return max(context - prompt_len, 1)
    if prompt_len + max_new_tokens <= context:
        return max_new_tokens
    if clamps:
        return context - prompt_len
    raise ContextExceeded(
        "max_tokens",
        f"the prompt has {_told_len(prompt)} and max_tokens is {max_new_tokens:,}; "
        f"together they exceed the context of {context:,} tokens",
    )


def _told_len(prompt: Prompt) -> str:
    """The length of a prompt, as text for messages."""
    told = counted(len(prompt.ids), "token")
    if prompt.media:
        num_media = sum(item.length for item in prompt.media)
        told += f" ({num_media:,} of them stand for images, videos or sounds)"
    return told


def _pack_ids(ids: Sequence[int], vocab_size: int) -> bytes:
    """int32 [n], packed. Raises `InvalidParam` for an id outside of the vocabulary."""
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


def _pack_prediction(prompt: Prompt, engine: EngineReady) -> bytes:
    """The prediction as packed int32 ids, without the part that is too long to become output."""
    if not prompt.prediction:
        return b""
    return _pack_ids(prompt.prediction[: engine.context_length], engine.vocab_size)


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


def _check_vectors_and_states(prompt: Prompt, engine: EngineReady) -> None:
    """Raise `InvalidParam` for options that do not go together or that this engine lacks."""
    wanted = prompt.params.hidden_states
    if wanted is not None and not engine.gives_hidden_states:
        raise InvalidParam(
            "return_hidden_states",
            "this server returns no hidden states; start it with --enable-return-hidden-states",
        )
    if wanted == "all" and prompt.session is not None:
        raise InvalidParam(
            "return_hidden_states", "hidden states of a session's history cannot be returned"
        )
    if prompt.vectors and prompt.session is not None:
        raise InvalidParam(
            PARAM, f"{PARAM} and session_params exclude each other: a session remembers token ids"
        )
    if prompt.vectors and prompt.params.prompt_logprobs is not None:
        raise InvalidParam(
            PARAM, f"{PARAM} has no log probabilities of the prompt: its tokens have no ids"
        )


def _check_media(prompt: Prompt) -> None:
    """Raise `InvalidParam` for options that do not go together with pictures, videos or sounds."""
    if prompt.session is not None:
        raise InvalidParam(
            "session_params",
            "session_params and images, videos and sounds exclude each other: "
            "a session remembers token ids",
        )
    if prompt.vectors:
        raise InvalidParam(
            PARAM, f"{PARAM} and images, videos and sounds exclude each other: both are vectors"
        )


# ---- words to tokens: the engine understands only tokens


def to_token_params(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """`params` with the tokens of its bad words.

    Raises `InvalidParam` for a budget of reasoning without marks of the reasoning.
    """
    if params.thinking_budget is not None and params.thinking_marks is None:
        raise InvalidParam(
            "thinking_budget",
            "this model has no known format of reasoning, so it takes no budget; start the "
            "server with --reasoning-parser",
        )
    if not params.bad_words:
        return params
    added = bad_word_ids(tokenizer, params.bad_words)
    return replace(params, bad_word_ids=params.bad_word_ids + added)


@lru_cache(maxsize=16)
def bad_word_ids(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, at the beginning of a text and after a space, without duplicates.

    A word can still be said in other tokens than those that the tokenizer makes of it.
    """
    texts: list[str] = []
    for word in words:
        bare = word.lstrip(" ")
        texts += [bare, " " + bare]
    encoded = tokenizer.encode_all(texts, add_special_tokens=False)
    return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))


def with_reasoning_marks(
    params: SamplingParams,
    format: ReasoningFormat | None,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
) -> SamplingParams:
    """`params` with the marks of the model's reasoning, if it has a budget. `prompt`: token ids."""
    if params.thinking_budget is None or format is None:
        return params
    if params.grammar is not None:
        # The grammar knows the marks. One without marks holds from the first token on: then there
        # is no reasoning, and nothing to bound.
        marks = params.grammar.behind
        budget = None if marks is None else params.thinking_budget
        return replace(params, thinking_budget=budget, thinking_marks=marks)
    prompt_end = tokenizer.decode(list(prompt[-TAIL_LEN:]), skip_special_tokens=False)
    texts = [format.begin, format.end]
    begin, end = tokenizer.encode_all(texts, add_special_tokens=False)
    is_open = format.is_open(prompt_end)
    marks = ThinkingMarks(tuple(begin), tuple(end), is_open)
    return replace(params, thinking_marks=marks)


# ---- input embeddings: vectors that a client gives for the tokens of a prompt


def pack_input_embeds(values: Any, engine: EngineReady) -> bytes:
    """float32 [n, hidden size], packed.

    `values`: nested lists, an array, or base64 of the packed form (little-endian). Raises
    `InvalidParam` for another shape, and for the first value that is infinite, or not a number,
    in the type that the model computes in.
    """
    size = engine.hidden_size
    if isinstance(values, str):
        rows = _decode_rows(values, size)
    else:
        rows = _read_rows(values)
    if rows.ndim != 2 or rows.shape[1] != size or not len(rows):
        raise InvalidParam(
            PARAM, f"{PARAM} has the shape {list(rows.shape)}; [tokens, {size:,}] is needed"
        )
    limit = INFINITE_FROM.get(engine.dtype, np.inf)
    finite = np.abs(rows) < limit  # also false for NaN
    if not finite.all():
        token, index = np.argwhere(~finite)[0].tolist()
        allowed = "finite numbers are allowed"
        if not np.isinf(limit):
            allowed = f"numbers between -{limit:g} and {limit:g} are allowed"
        raise InvalidParam(
            PARAM,
            f"{PARAM}[{token}][{index}] is {rows[token, index]}; "
            f"the model computes in {engine.dtype}: {allowed}",
        )
    return np.ascontiguousarray(rows, dtype="<f4").tobytes()


def media_bytes(prompt: Prompt) -> int:
    """Of the values of its pictures, videos and sounds."""
    return sum(len(item.values) for item in prompt.media)


def placeholder_ids(vectors: bytes, engine: EngineReady) -> list[int]:
    """The ids of a prompt that consists of `vectors`."""
    return [PLACEHOLDER] * (len(vectors) // (4 * engine.hidden_size))


def _decode_rows(text: str, size: int) -> NDArray[np.float32]:
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InvalidParam(PARAM, f"{PARAM} is a text, but not base64: {exc}") from exc
    row_bytes = 4 * size
    if len(raw) % row_bytes:
        raise InvalidParam(
            PARAM,
            f"{PARAM} has {len(raw):,} bytes; "
            f"{size:,} float32 for each token are a multiple of {row_bytes:,}",
        )
    return np.frombuffer(raw, dtype="<f4").reshape(-1, size)


def _read_rows(values: Any) -> NDArray[np.float32]:
    try:
        # too large a value becomes infinite, which the caller finds
        with np.errstate(over="ignore"):
            return np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError, OverflowError) as exc:
        raise InvalidParam(
            PARAM, f"{PARAM} is not a list of lists of numbers with equal lengths"
        ) from exc

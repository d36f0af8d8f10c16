"""What the engine does not understand, as tokens and vectors: forbidden words, the marks of the
model's reasoning, and input embeddings.

`client/requests.py` checks and sends the requests. This module knows nothing of them, nor of HTTP.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from weft.messages.sampling import InvalidParam, SamplingParams, ThinkingMarks
from weft.messages.status import EngineReady
from weft.text.parsers.formats import ReasoningFormat
from weft.text.tokenizer import Tokenizer

TAIL_LEN = 32  # tokens at the end of a prompt in which a template can open the reasoning
PARAM = "input_embeds"
# A number of this size or larger becomes infinite when it is rounded to the type.
INFINITE_FROM = {"bfloat16": (2 - 2**-8) * 2.0**127, "float16": 65_520.0}
PLACEHOLDER = 0  # the id of every token of a prompt that consists of input embeddings

# ---- words


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
    if params.thinking_marks is not None:  # of a grammar that holds the reasoning as well
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

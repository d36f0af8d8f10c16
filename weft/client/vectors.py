"""Input embeddings: vectors that a client gives for the tokens of a prompt, instead of their ids."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np

from weft.messages.control import EngineReady
from weft.messages.sampling import InvalidParam, SamplingParams

PARAM = "input_embeds"
# What is rounded to the nearest number of a type and is this large or larger becomes infinite there.
INFINITE_FROM = {"bfloat16": (2 - 2**-8) * 2.0**127, "float16": 65_520.0}
PLACEHOLDER = 0  # the id of every token of such a prompt


def packed_vectors(values: Any, engine: EngineReady) -> bytes:
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


def placeholders(vectors: bytes, engine: EngineReady) -> list[int]:
    """The ids of a prompt that consists of `vectors`."""
    return [PLACEHOLDER] * (len(vectors) // (4 * engine.hidden_size))


def check_wishes(
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

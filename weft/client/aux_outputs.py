"""Auxiliary outputs of a completion: hidden states, the use of caches, and log probabilities of the
prompt.

The engine sends them in pieces, which are joined here. This module knows nothing of HTTP: the
server has the formats of the APIs. (The name is not `aux`, which no file may have on Windows.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.messages.replies import AuxPiece, CacheUsePiece, HiddenStatesPiece, PromptLogprobsPiece
from weft.messages.requests import GenerateRequest

# ---- hidden states


def hidden_states(outputs: Sequence[AuxPiece], prompt_len: int, num_tokens: int) -> list[Any]:
    """SGLang's form: the states of the prompt [prompt_len][H], then [H] for each output token.

    The last token has none, because it has not been computed.
    """
    rows = hidden_state_rows(outputs, prompt_len, num_tokens)
    return [rows[:prompt_len].tolist(), *rows[prompt_len:].tolist()]


def hidden_state_rows(
    outputs: Sequence[AuxPiece],
    prompt_len: int,
    num_tokens: int,
) -> NDArray[np.float32]:
    """The same as rows [n, H]; one row, if the request wants the last state only."""
    return _rows(outputs)[: prompt_len + max(num_tokens - 1, 0)]


def last_state(outputs: Sequence[AuxPiece]) -> list[float]:
    """[H] the state from which the last token was sampled."""
    values: list[float] = _rows(outputs)[-1:].ravel().tolist()
    return values


def num_hidden_states(request: GenerateRequest, context_length: int) -> int:
    """The largest number of states of a prompt, in all its completions."""
    params = request.sampling
    if params.hidden_states is None:
        return 0
    if params.hidden_states == "last":
        return params.n
    max_new_tokens = params.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = context_length - request.prompt_len
    return params.n * (request.prompt_len + max_new_tokens)


def _rows(outputs: Sequence[AuxPiece]) -> NDArray[np.float32]:
    """[n, H] in the order of positions."""
    pieces: list[NDArray[np.float32]] = []
    for output in outputs:
        if isinstance(output, HiddenStatesPiece):
            values = np.frombuffer(output.vectors, dtype=np.float32)
            pieces.append(values.reshape(output.num_tokens, -1))
    if not pieces:
        return np.empty((0, 0), dtype=np.float32)
    return np.concatenate(pieces)


# ---- caches


def cache_use(outputs: Sequence[AuxPiece]) -> CacheUsePiece:
    """The use of the caches by a request that has asked for it."""
    for output in outputs:
        if isinstance(output, CacheUsePiece):
            return output
    return CacheUsePiece(id=-1)


# ---- log probabilities of the prompt


class PromptToken(NamedTuple):
    """One token of a prompt, given those before it. The first of a request has no numbers."""

    token: int
    # Natural logarithm; None: unknown, or the model's output was not finite.
    logprob: float | None = None
    rank: int = 0  # 1: no token is likelier; 0: unknown
    top: Sequence[tuple[int, float]] = ()  # the likeliest tokens, likeliest first
    of_ids: Sequence[float] = ()  # of `logprob_token_ids`, in their order


def prompt_logprobs(outputs: Sequence[AuxPiece]) -> list[PromptToken]:
    """The prompt's tokens from `prompt_logprobs_start` on that have come so far."""
    tokens: list[PromptToken] = []
    for output in outputs:
        if isinstance(output, PromptLogprobsPiece):
            tokens += _tokens(output)
    return tokens


def num_prompt_logprobs(request: GenerateRequest) -> int:
    """The number of values of a prompt, in all its completions."""
    params = request.sampling
    if params.prompt_logprobs is None:
        return 0
    num_tokens = max(request.prompt_len - params.prompt_logprobs_start, 0)
    values_per_token = 1 + params.prompt_logprobs + len(params.logprob_token_ids)
    return num_tokens * values_per_token * params.n


def _tokens(piece: PromptLogprobsPiece) -> list[PromptToken]:
    tokens = _integers(piece.tokens).tolist()
    logprobs = _floats(piece.logprobs).tolist()
    ranks = _integers(piece.ranks).tolist()
    shape = (len(tokens), piece.num_top)
    top_ids = _integers(piece.top_ids).reshape(shape).tolist()
    top_logprobs = _floats(piece.top_logprobs).reshape(shape).tolist()
    of_ids = _floats(piece.id_logprobs).reshape(len(tokens), piece.num_ids).tolist()
    found: list[PromptToken] = []
    for i, token in enumerate(tokens):
        if math.isnan(logprobs[i]):
            found.append(PromptToken(token))
            continue
        top = zip(top_ids[i], top_logprobs[i], strict=True)
        own = PromptToken(
            token=token,
            logprob=logprobs[i],
            rank=ranks[i],
            top=list(top),
            of_ids=of_ids[i],
        )
        found.append(own)
    return found


def _integers(packed: bytes) -> NDArray[np.int32]:
    return np.frombuffer(packed, dtype=np.int32)


def _floats(packed: bytes) -> NDArray[np.float32]:
    return np.frombuffer(packed, dtype=np.float32)

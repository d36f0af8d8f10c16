"""Auxiliary outputs of a completion, put together from the pieces in which the engine gives them: hidden states and log
probabilities of the prompt."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.client.prompt import Prompt
from weft.messages.replies import Extra, HiddenStates, PromptPiece


def hidden_states(given: Sequence[Extra], prompt_len: int, num_tokens: int) -> list[Any]:
    """SGLang's form: the states of the prompt [prompt_len][H], then one [H] for each token of the output but the last,
    of which nothing has been computed."""
    rows = hidden_state_rows(given, prompt_len, num_tokens)
    return [rows[:prompt_len].tolist(), *rows[prompt_len:].tolist()]


def hidden_state_rows(
    given: Sequence[Extra], prompt_len: int, num_tokens: int
) -> NDArray[np.float32]:
    """The same as rows [n, H]; one, if only the last was wanted."""
    return _rows(given)[: prompt_len + max(num_tokens - 1, 0)]


def last_state(given: Sequence[Extra]) -> list[float]:
    """[H] what the last token was sampled from."""
    values: list[float] = _rows(given)[-1:].ravel().tolist()
    return values


def num_hidden_states(prompt: Prompt, context_length: int) -> int:
    """How many may be told of a prompt, in all its completions."""
    params = prompt.params
    if params.hidden_states is None:
        return 0
    max_new = (
        context_length - len(prompt.ids) if params.max_new_tokens is None else params.max_new_tokens
    )
    return params.n * (len(prompt.ids) + max_new if params.hidden_states == "all" else 1)


def _rows(given: Sequence[Extra]) -> NDArray[np.float32]:
    """[n, H] in the order of positions."""
    pieces = [one for one in given if isinstance(one, HiddenStates)]
    if not pieces:
        return np.empty((0, 0), dtype=np.float32)
    return np.concatenate(
        [np.frombuffer(one.vectors, dtype=np.float32).reshape(one.num_tokens, -1) for one in pieces]
    )


class PromptToken(NamedTuple):
    """One token of a prompt, given those before it. The first that was asked for is told by itself."""

    token: int
    logprob: float | None = (
        None  # natural logarithm; None: not known, or the model's output was not finite
    )
    rank: int = 0  # 1: no token is likelier; 0: not known
    top: Sequence[tuple[int, float]] = ()  # the likeliest tokens, likeliest first
    of_ids: Sequence[float] = ()  # of `logprob_token_ids`, in their order


def prompt_logprobs(given: Sequence[Extra]) -> list[PromptToken]:
    """One for each prompt token from `prompt_logprobs_start` on, as far as they have come."""
    return [token for piece in given if isinstance(piece, PromptPiece) for token in _tokens(piece)]


def _tokens(piece: PromptPiece) -> Iterator[PromptToken]:
    tokens = np.frombuffer(piece.tokens, dtype=np.int32).tolist()
    logprobs = np.frombuffer(piece.logprobs, dtype=np.float32).tolist()
    ranks = np.frombuffer(piece.ranks, dtype=np.int32).tolist()
    shape = (len(tokens), piece.num_top)
    top_ids = np.frombuffer(piece.top_ids, dtype=np.int32).reshape(shape).tolist()
    top = np.frombuffer(piece.top_logprobs, dtype=np.float32).reshape(shape).tolist()
    of_ids = (
        np.frombuffer(piece.id_logprobs, dtype=np.float32)
        .reshape(len(tokens), piece.num_ids)
        .tolist()
    )
    for token, logprob, rank, ids, values, others in zip(
        tokens, logprobs, ranks, top_ids, top, of_ids, strict=True
    ):
        if math.isnan(logprob):
            yield PromptToken(token)
        else:
            yield PromptToken(token, logprob, rank, list(zip(ids, values, strict=True)), others)


def num_prompt_logprobs(prompt: Prompt) -> int:
    """How many values are told of a prompt, in all its completions."""
    params = prompt.params
    if params.prompt_logprobs is None:
        return 0
    length = max(len(prompt.ids) - params.prompt_logprobs_start, 0)
    return length * (1 + params.prompt_logprobs + len(params.logprob_token_ids)) * params.n

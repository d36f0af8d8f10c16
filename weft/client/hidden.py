"""Hidden states, put together from the pieces in which the engine gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.client.generation import Prompt
from weft.messages.replies import Extra, HiddenStates


def hidden_states(given: Sequence[Extra], prompt_len: int, num_tokens: int) -> list[Any]:
    """SGLang's form: the states of the prompt [prompt_len][H], then one [H] for each token of the output but the last,
    of which nothing has been computed."""
    rows = told_states(given, prompt_len, num_tokens)
    return [rows[:prompt_len].tolist(), *rows[prompt_len:].tolist()]


def told_states(given: Sequence[Extra], prompt_len: int, num_tokens: int) -> NDArray[np.float32]:
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

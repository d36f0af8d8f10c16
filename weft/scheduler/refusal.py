"""Requests that are refused on arrival, because they could never run. (The queue's limits are in `queue.py`.)"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.messages.requests import GenerateRequest


class Refusal(NamedTuple):
    message: str
    status: int  # as an HTTP status


QUEUE_IS_FULL = Refusal("The request queue is full.", 503)


def refusal(message: GenerateRequest, *, vocab_size: int, max_len: int) -> Refusal | None:
    """Why a request cannot be taken. `max_len`: prompt and output together, in tokens."""
    prompt = np.frombuffer(message.input_ids[: len(message.input_ids) // 4 * 4], dtype=np.int32)
    if not len(prompt):
        return Refusal("the prompt is empty", 400)
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        return Refusal(f"the prompt has token id {bad}; 0 to {vocab_size - 1:,} are allowed", 400)
    new = message.sampling.max_new_tokens or 1
    if len(prompt) + new > max_len:
        return Refusal(
            f"the prompt has {len(prompt):,} tokens and {new:,} are to be generated; together at most {max_len:,} fit",
            400,
        )
    return None

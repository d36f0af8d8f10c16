"""What the engine sends back for work: one `StepOutput` a step, in columns."""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Log probabilities of one sampled token: its own, and the k likeliest, likeliest first."""

    id: int  # of the request
    logprob: float
    top_ids: list[int]  # [k]
    top_logprobs: list[float]  # [k]


class Finish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The one final word on a request. Tokens of the same step come before it."""

    id: int
    reason: FinishReason
    matched: int | None = None  # the token id that stopped it, if one did
    message: str = ""  # why, for "abort" and "error"
    status: int = 200  # as an HTTP status: 400 and above is an error; an abort that was asked for is none
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache when it was first admitted
    queue_s: float = 0.0  # from arrival in the scheduler to first admission
    prefill_s: float = 0.0  # from there to the first token
    retractions: int = 0


class Warned(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Something that the user of a request is to know. It comes before its first token."""

    id: int  # of the request
    text: str


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="step"):
    """Tokens sampled in one step, and requests that ended in it.

    `ids[i]` got `tokens[i]`; an id may stand more than once, in order. The token that ended a request by stopping it is
    included. A log probability follows the order of `ids` among the requests that asked for it.
    """

    ids: bytes = b""  # int64 [n], packed
    tokens: bytes = b""  # int32 [n], packed
    logprobs: list[TokenLogprobs] = []
    finished: list[Finish] = []
    warnings: list[Warned] = []

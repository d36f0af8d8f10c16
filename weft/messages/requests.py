"""Work that the front sends to the engine."""

from __future__ import annotations

import msgspec

from weft.messages.sampling import SamplingParams


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="generate"):
    """Generate one completion of one prompt.

    `id` is the sender's own number for it, unique among its open requests: every reply carries it. `rid` is the name
    that the user gave or was given; two requests may have the same. A completion with n > 1 is n requests: they share
    the prompt through the prefix cache.
    """

    id: int
    rid: str
    input_ids: bytes  # int32 [prompt_len], packed
    sampling: SamplingParams
    user: str = ""
    priority: int = 0
    timeout_ms: int = 0  # after so long since its arrival it is ended, wherever it is; 0: never
    cache_salt: str = ""  # requests share cached prefixes only with equal salts


class Abort(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    """End requests by the sender's numbers, or all of them. Each ends with finish reason "abort"; unknown ids are
    ignored (the request has just finished)."""

    ids: tuple[int, ...] = ()
    all: bool = False
    message: str = "aborted by the client"

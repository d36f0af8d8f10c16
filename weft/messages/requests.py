"""Work that the front sends to the engine."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from weft.messages.pooling import PoolingParams
from weft.messages.replies import FinishReason
from weft.messages.sampling import SamplingParams
from weft.messages.sessions import SessionParams


class GenerateRequest(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="generate"
):
    """Generate one completion of one prompt.

    `id` is the sender's own number for it, unique among its open requests: every reply carries it. `rid` is the name
    that the user gave or was given; two requests may have the same. A completion with n > 1 is n requests: they share
    the prompt through the prefix cache. `group` is a second name, shared by the members of a batch.
    """

    id: int
    rid: str
    input_ids: bytes = b""  # int32 [prompt_len], packed
    sampling: SamplingParams
    group: str = ""
    tenant: str = ""  # whom the policy "fair" serves with it; all without a name are one
    user: str = ""  # as the request itself says; decides nothing
    priority: int = 0
    timeout_ms: int = 0  # after so long since its arrival it is ended, wherever it is; 0: never
    cache_salt: str = ""  # requests share cached prefixes only with equal salts
    session: SessionParams | None = None  # the prompt is put after the history of this session
    fresh_from: int | None = (
        None  # tokens from this position on are computed, though the cache may have them
    )
    vectors: bytes = (
        b""  # float32 [prompt_len, hidden size], packed: they stand for the tokens of the prompt
    )
    shares_kv: bool = (
        True  # false: the ids of its prompt mean nothing; the prefix cache gives and gets nothing
    )
    pooling: PoolingParams | None = None  # it wants no tokens, but this


class BatchGenerate(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="batch_generate"
):
    """Several generate requests in one message, each of them taken in, refused and answered by itself.

    A prompt travels once, however many requests have it.
    """

    prompts: list[bytes]  # int32 [prompt_len] each, packed
    requests: list[GenerateRequest]  # [n] without `input_ids` and `vectors`
    prompt_of: list[
        int
    ]  # [n] place in `prompts`; one that is not there leaves its request without a prompt
    vectors: dict[int, bytes] = {}  # of the prompts that have some, by place in `prompts`

    def members(self) -> Iterator[GenerateRequest]:
        """The requests with their prompts."""
        places = dict(enumerate(self.prompts))
        for request, place in zip(self.requests, self.prompt_of, strict=False):
            yield msgspec.structs.replace(
                request, input_ids=places.get(place, b""), vectors=self.vectors.get(place, b"")
            )


class Abort(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    """End requests by the sender's numbers, by name, or all of them. Each ends with finish reason "abort", or "error"
    with a `status` of 400 and above; unknown ones are ignored (the request has just finished).

    With `output_lens` the sender has found their end by itself, after so many output tokens: that much of each becomes
    history of its session, if it has one. What is aborted otherwise leaves no trace there.
    """

    ids: tuple[int, ...] = ()
    output_lens: tuple[int, ...] = ()  # as many as `ids`, or none
    names: tuple[str, ...] = ()  # exact rids, or groups
    all: bool = False
    message: str = "aborted by the client"
    status: int = 200

    @property
    def reason(self) -> FinishReason:
        return "abort" if self.status < 400 else "error"

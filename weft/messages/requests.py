"""Work that the front sends to the engine.

Journals store each field of these messages under its encoded name.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from weft.config.numbers import MAX_LABEL_IDS
from weft.messages.handoff import HandoffParams
from weft.messages.media import ID_BYTES, MediaItem
from weft.messages.pins import PinMark
from weft.messages.replies import FinishReason
from weft.messages.sampling import InvalidParam, SamplingParams, check_number, check_token_ids
from weft.messages.sessions import SessionParams

ADMINISTRATOR = "*"  # instead of a tenant: may read about the requests of all; no key has this name


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ask for a vector of the prompt, or for scores of labels.

    With `label_ids`, and a model that generates: the log probabilities of these tokens after the
    prompt.
    """

    # Scale a vector to length 1, turn scores into probabilities; None: the default of the model.
    normalize: bool | None = None
    dimensions: int = 0  # leading numbers of a vector to keep (Matryoshka); 0 keeps all
    # packed uint8 [prompt_len]: kind of segment of each token; empty: all 0
    token_type_ids: bytes = b""
    label_ids: tuple[int, ...] = ()

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidParam` for the first value out of range.

        The engine checks what depends on the model.
        """
        if self.dimensions:
            check_number("dimensions", "dimensions", self.dimensions)
        if len(self.label_ids) > MAX_LABEL_IDS:
            message = f"{len(self.label_ids):,} ids; at most {MAX_LABEL_IDS:,} are allowed"
            raise InvalidParam("label_token_ids", message)
        check_token_ids("label_token_ids", self.label_ids, vocab_size)


class GenerateRequest(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="generate"
):
    """Generate one completion of one prompt.

    `id` is the sender's own number for the request, unique among its open requests; every reply
    carries it. The front makes a request once, without a number; `client/requests.py` checks and
    numbers it. `rid` is the name that the user gave or was given; several requests may have the
    same. A request for n > 1 completions is sent as n requests, which share the prompt through the
    prefix cache. `group` is a second name, shared by the members of a batch.
    """

    id: int = 0
    rid: str
    input_ids: bytes = b""  # int32 [prompt_len], packed
    sampling: SamplingParams
    group: str = ""
    tenant: str = ""  # tenant for the policy "fair"; all requests without a name are one tenant
    user: str = ""  # the name in the request; it has no effect
    priority: int = 0
    background: bool = False  # it gets what other requests leave
    timeout_ms: int = 0  # from arrival until the engine ends the request in any state; 0: no limit
    cache_salt: str = ""  # requests share cached prefixes only with equal salts
    session: SessionParams | None = None  # the prompt is appended to the history of this session
    # Tokens from this position on are computed even if they are cached; None: no token. Journals
    # store the field under its earlier name.
    recompute_from: int | None = msgspec.field(default=None, name="fresh_from")
    # Packed float32 [prompt_len, hidden size]: embeddings that replace the tokens of the prompt.
    vectors: bytes = b""
    # False: the ids of the prompt have no meaning, so the prefix cache is neither read nor written.
    shares_kv: bool = True
    pooling: PoolingParams | None = None  # what to compute instead of tokens
    # Packed int32: tokens that the client expects the output to resemble. They change no answer.
    prediction: bytes = b""
    adapter: str = ""  # uid of the adapter of this request; empty: none
    media: tuple[MediaItem, ...] = ()  # pictures, videos and sounds, in the order of the prompt
    ttft_ms: int = 0  # from arrival to the first token; refused if that is impossible; 0: no limit
    pins: tuple[PinMark, ...] = ()  # prefixes of the prompt that stay cached, the shortest first
    # The reply tells where the cached tokens of the prompt were. With `pins` it always does.
    tells_cache: bool = False
    # The answer tells why not more of the prompt was cached; of other requests, it names those of
    # this tenant, or all for `ADMINISTRATOR`, and gives of others lengths alone. None: it does not.
    tells_cause_to: str | None = None
    # Another server computes the prompt, or continues this request; None: neither.
    handoff: HandoffParams | None = None
    may_pause: bool = False  # it may end with calls of tools, and be continued with their results

    @property
    def prompt_len(self) -> int:
        return len(self.input_ids) // ID_BYTES

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(start, end) of each item of `media` in the prompt; `end` is exclusive."""
        return [(item.start, item.end) for item in self.media]


class BatchGenerate(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="batch_generate"
):
    """Several generate requests in one message. Each is accepted, refused and answered separately.

    A prompt is sent once, even if several requests have it.
    """

    prompts: list[bytes]  # int32 [prompt_len] each, packed
    requests: list[GenerateRequest]  # [n] without `input_ids`, `vectors` and `media`
    # [n] index in `prompts`; a request whose index does not exist has no prompt.
    prompt_of: list[int]
    vectors: dict[int, bytes] = {}  # embeddings of prompts, by index in `prompts`
    media: dict[int, tuple[MediaItem, ...]] = {}  # media of prompts, by index in `prompts`

    def members(self) -> Iterator[GenerateRequest]:
        """The requests with their prompts."""
        prompts = dict(enumerate(self.prompts))
        for request, index in zip(self.requests, self.prompt_of, strict=False):
            yield msgspec.structs.replace(
                request,
                input_ids=prompts.get(index, b""),
                vectors=self.vectors.get(index, b""),
                media=self.media.get(index, ()),
            )


class Abort(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    """End requests by the sender's numbers, by name, or all of them.

    Each request ends with finish reason "abort", or "error" with a `status` of 400 and above.
    Unknown numbers are ignored, because the request may just have finished.

    With `output_lens` the sender itself has found the end of each request, after this number of
    output tokens: these tokens become history of the request's session, if it has one. Without it,
    an aborted request adds nothing to its session.
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

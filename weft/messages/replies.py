"""The engine's output: one `StepOutput` per step, in columns.

Journals hold checksums of the encoded `Finish`, so its fields keep their names and their order.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from weft.messages.weights import FIRST_VERSION

FinishReason = Literal["stop", "length", "abort", "error"]
PIECE_BYTES = 64 << 20  # of hidden states in one message


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Log probabilities of one sampled token, and of the k likeliest tokens, likeliest first."""

    id: int  # of the request
    logprob: float
    top_ids: list[int]  # [k]
    top_logprobs: list[float]  # [k]
    id_logprobs: list[float] = []  # of `logprob_token_ids`


class Finish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The final message about a request. Tokens of the same step come before it.

    The front completes it for the answer, with what only the front knows.
    """

    id: int
    reason: FinishReason
    # The token id that stopped it, if one did; from the front: or the stop string.
    matched: int | str | None = None
    message: str = ""  # the reason, for "abort" and "error"
    status: int = 200  # HTTP status; 400 and above is an error
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache when it was first admitted
    queue_s: float = 0.0  # from arrival in the scheduler to first admission
    prefill_s: float = 0.0  # from there to the first token
    retractions: int = 0
    retry_after_s: int = 0  # when there may be room, for status 503; 0: unknown
    # Tokens of the client's prediction that were accepted and rejected as drafts.
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    # Set by the front:
    e2e_s: float = 0.0  # from the making of the request to its end
    weight_version: str = FIRST_VERSION  # of the weights that computed its last token

    @property
    def failed(self) -> bool:
        return self.status >= 400


WAIT_HEADER = "wait-ms"  # its text is LOW-HIGH, in milliseconds from the arrival in the engine


class RequestWarning(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A text for the user of a request. It comes before the first token."""

    id: int  # of the request
    text: str
    header: str = "warnings"  # of the HTTP answer, without its prefix "x-weft-"


class PooledPiece(msgspec.Struct, frozen=True, kw_only=True, tag="pooled"):
    """The vector of a prompt, or the scores of its labels."""

    id: int  # of the request
    vector: bytes  # float32 [size], packed


class HiddenStatesPiece(msgspec.Struct, frozen=True, kw_only=True, tag="hidden_states"):
    """Hidden states of consecutive tokens, after the final norm."""

    id: int  # of the request
    start: int  # position of the first token in prompt and output
    num_tokens: int
    vectors: bytes  # float32 [num_tokens, hidden size], packed


class HeardWeightsPiece(msgspec.Struct, frozen=True, kw_only=True, tag="heard_weights"):
    """The weights with which single heads attend to the sound, of consecutive tokens."""

    id: int  # of the request
    start: int  # position of the first token in the prompt
    shape: tuple[int, ...]  # [tokens, heads, vectors of the encoder]
    weights: bytes  # float32, packed


class PromptLogprobsPiece(msgspec.Struct, frozen=True, kw_only=True, tag="prompt_logprobs"):
    """Log probabilities of n consecutive prompt tokens, which follow those of the previous piece.

    The first token of the first piece has none (NaN, rank 0). All arrays are packed.
    """

    id: int  # of the request
    tokens: bytes  # int32 [n]
    logprobs: bytes  # float32 [n]
    ranks: bytes  # int32 [n] 1: no token is likelier
    num_top: int
    top_ids: bytes  # int32 [n, num_top], likeliest first
    top_logprobs: bytes  # float32 [n, num_top]
    num_ids: int
    id_logprobs: bytes  # float32 [n, num_ids] of `logprob_token_ids`


class CacheUsePiece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="cache_use"):
    """The cached and pinned tokens of a request's prompt. It comes at the end of the request."""

    id: int  # of the request
    disk_tokens: int = 0  # cached tokens that were read from a folder
    host_tokens: int = 0  # cached tokens that were read from the memory of the host
    pinned_tokens: int = 0  # length of the longest of its `pins` that is pinned now
    why: str = ""  # the reason why its longest pin is not pinned; "" if it is


# Outputs of a request besides tokens; they come before its `Finish`.
AuxPiece = PooledPiece | HiddenStatesPiece | HeardWeightsPiece | PromptLogprobsPiece | CacheUsePiece


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="step"):
    """Tokens sampled in one step, and requests that ended in it.

    `ids[i]` got `tokens[i]`; an id may occur more than once, in the order of its tokens. A stop
    token that ended a request is included. `logprobs` are in the order of `ids`, only for requests
    that asked for them.
    """

    ids: bytes = b""  # int64 [n], packed
    tokens: bytes = b""  # int32 [n], packed
    logprobs: list[TokenLogprobs] = []
    aux: list[AuxPiece] = []
    finished: list[Finish] = []
    warnings: list[RequestWarning] = []

    def pieces(self, max_bytes: int = PIECE_BYTES) -> list[StepOutput]:
        """This output as several messages, if it has more than `max_bytes` of hidden states.

        Channels limit the size of a message. Hidden states come before the rest.
        """
        sizes = [_num_bytes(one) for one in self.aux]
        if sum(sizes) <= max_bytes:
            return [self]
        groups: list[list[AuxPiece]] = [[]]
        room = max_bytes
        for one, size in zip(self.aux, sizes, strict=True):
            if size > room and groups[-1]:
                groups.append([])
                room = max_bytes
            groups[-1].append(one)
            room -= size
        first = [StepOutput(aux=group) for group in groups]
        return [*first, msgspec.structs.replace(self, aux=[])]


def _num_bytes(one: AuxPiece) -> int:
    """Bytes that count towards the size of a message: few kinds are large."""
    if isinstance(one, HeardWeightsPiece):
        return len(one.weights)
    if isinstance(one, HiddenStatesPiece):
        return len(one.vectors)
    return 0


def ids_of(output: StepOutput) -> set[int]:
    """The ids of all requests in a step's output."""
    end = len(output.ids) // 8 * 8
    ids = set(memoryview(output.ids[:end]).cast("q"))
    for one in (*output.logprobs, *output.aux, *output.finished, *output.warnings):
        ids.add(one.id)
    return ids

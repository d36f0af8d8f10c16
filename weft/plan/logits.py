"""Changes of the logits that a step may carry, and the order in which they are made.

An operation is a frozen value of arrays: a feature of the scheduler makes it, and the runner has a
function for its type (`executor/outputs/sampler.py`). Where an operation names requests, `index`
counts the S sampling requests of the step, from 0. This module knows neither requests nor tensors.
A new kind of operation is a class and an entry in `ORDER`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from weft.arrays import BoolArray, FloatArray, IntArray

ANY = -1  # in LogitBias.after

# The error of a request whose operations forbid every token, which is a fault of the client.
NOTHING_LEFT = (
    "the request leaves no token to choose: its allowed_token_ids, bad_words, min_tokens, logit "
    "processors and grammar exclude each other"
)

# Marks a field that the journal leaves out of its digests, because no decision depends on it.
UNRECORDED = {"is_recorded": False}


@dataclass(frozen=True, slots=True)
class LogitOp:
    """A change of the logits before tokens are chosen."""


@dataclass(frozen=True, slots=True)
class LogitBias(LogitOp):
    """Values added to single logits, -inf to forbid a token (min_new_tokens, bad words)."""

    index: IntArray  # [B] which sampling request
    tokens: IntArray  # [B]
    values: FloatArray  # [B]
    # [B] applies only if this is the request's last token (ANY: every token); None: always
    after: IntArray | None = None


@dataclass(frozen=True, slots=True)
class Penalties(LogitOp):
    """Penalties on tokens seen before, for P of the S sampling requests.

    `history` is each request's prompt and known output, one request after the other:

        history         | prompt 0 | output 0 | prompt 1 | output 1 |
        offsets         0                     ^                     ^
        output_starts              ^                     ^

    Where `lacks_last[i]`, the last output token of request i is not in `history`, because only the
    device knows it yet: the runner adds it.
    """

    index: IntArray  # [P] which sampling request
    frequency: FloatArray  # [P]
    presence: FloatArray  # [P]
    repetition: FloatArray  # [P]
    history: IntArray  # [H]
    offsets: IntArray  # [P + 1] into `history`
    output_starts: IntArray  # [P] into `history`
    lacks_last: BoolArray  # [P]


@dataclass(frozen=True, slots=True)
class ProcessorCall(LogitOp):
    """Input of one logit processor, for P of the S sampling requests."""

    name: str
    index: IntArray  # [P] which sampling request
    params: tuple[Mapping[str, Any], ...]  # [P] plain JSON values
    tokens: tuple[IntArray, ...]  # [P] prompt and whole output, [length] each
    prompt_lens: tuple[int, ...]  # [P]


@dataclass(frozen=True, slots=True)
class AllowedTokens(LogitOp):
    """The tokens that M of the S sampling requests may choose from, the same at every step.

    Token t is allowed if bit t % 32 of word t // 32 is 1; tokens from 32 W on are forbidden.
    """

    index: IntArray  # [M] which sampling request
    words: IntArray  # [M, W]


class LazyBitmask(Protocol):
    """Bitmasks that a thread may still compute while the model computes the logits."""

    @property
    def words(self) -> IntArray:
        """[M, W], bits as in `AllowedTokens`. Waits until they are computed."""
        ...

    @property
    def faults(self) -> Mapping[int, str]:
        """Errors by row [M]. The request of such a row must end with the error: its bits mean
        nothing.

        Waits for the bitmasks.
        """
        ...


@dataclass(frozen=True, slots=True)
class GrammarMask(LogitOp):
    """The tokens that the grammars of M of the S sampling requests allow next.

    Only the sampler reads the words, after the layers have been launched.
    """

    index: IntArray  # [M] which sampling request
    bitmask: LazyBitmask = field(metadata=UNRECORDED)


@dataclass(frozen=True, slots=True)
class TimestampRules(LogitOp):
    """Rules of Whisper about the tokens that are times: all ids from `first` on.

    The ids of the ranges are forbidden. Of the rest, if all times together are likelier than every
    other token, only times are left.
    """

    index: IntArray  # [R] which sampling request
    first: IntArray  # [R]
    forbidden: IntArray  # [R, K, 2] ranges of ids, the end exclusive; empty ones as padding


@dataclass(frozen=True, slots=True)
class FixedTokens(LogitOp):
    """The tokens that F of the S sampling requests take, whatever their logits are."""

    index: IntArray  # [F] which sampling request
    tokens: IntArray  # [F]


# Operations of one type keep the order in which the features add them.
ORDER: tuple[type[LogitOp], ...] = (
    LogitBias,
    Penalties,
    ProcessorCall,
    AllowedTokens,
    GrammarMask,
    TimestampRules,
    FixedTokens,
)
_RANKS = {kind: rank for rank, kind in enumerate(ORDER)}


def in_order(ops: Sequence[LogitOp]) -> list[LogitOp]:
    """The operations in the order in which a runner makes them.

    Raises KeyError for a type that is not in `ORDER`.
    """
    return sorted(ops, key=lambda op: _RANKS[type(op)])

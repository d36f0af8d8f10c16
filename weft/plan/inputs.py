"""Inputs of a step besides token ids."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.arrays import FloatArray, IntArray
from weft.plan.logits import UNRECORDED


@dataclass(frozen=True, slots=True)
class InputOp:
    """A change of what the first layer reads."""


@dataclass(frozen=True, slots=True)
class InputVectors(InputOp):
    """Vectors that the first layer reads instead of the embeddings of V tokens of a step.

    The ids of these tokens are valid, and mean nothing.
    """

    index: IntArray  # [V] which token of the step, 0..T-1
    rows: FloatArray  # [V, hidden size]


@dataclass(frozen=True, slots=True)
class MediaValues:
    """What the encoder reads of one thing. Journals have none of it."""

    # In the shape that the encoder reads. Whoever made the request has checked that it fits.
    array: FloatArray


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One thing that the model's encoder turns into vectors (`messages/media.py`)."""

    digest: bytes
    kind: str  # image, video, audio
    length: int  # vectors that it becomes
    grid: tuple[int, int, int] | None
    values: MediaValues = field(metadata=UNRECORDED)


@dataclass(frozen=True, slots=True)
class MediaVectors(InputOp):
    """Vectors that the model's encoder makes, for V tokens of a step.

    The device keeps what it has encoded, by digest, until a plan drops it. A step drops first, then
    encodes, then takes; what it takes is encoded in it, or was in a step before. What is dropped
    need not be there. Each piece of a split prefill takes the vectors of its tokens.
    """

    drops_all: bool  # that it has from steps before
    drop: tuple[bytes, ...]  # digests
    encode: tuple[EncoderInput, ...]
    items: tuple[bytes, ...]  # digests of those that tokens are taken from
    index: IntArray  # [V] which token of the step, 0..T-1
    item: IntArray  # [V] place in `items`
    row: IntArray  # [V] which of its vectors


@dataclass(frozen=True, slots=True)
class EncodeAhead:
    """What the encoder works on behind a step, for later ones: for a while, so that those who wait
    for their next token do not wait for a large picture as a whole.

    It does at least one piece of the work, and goes on where it stopped if the next step says the
    same again. The result tells of those that are there then (`Result.encoded`).
    """

    encode: tuple[EncoderInput, ...]  # in this order
    seconds: float
    generation: int  # of the scheduler's books; means nothing to the device

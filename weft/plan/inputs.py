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
    """Vectors that the first layer reads for V tokens of a step, instead of their embeddings.

    The ids of these tokens are valid, but are not used.
    """

    index: IntArray  # [V] which token of the step, 0..T-1
    rows: FloatArray  # [V, hidden size]


@dataclass(frozen=True, slots=True)
class MediaValues:
    """The array that the encoder reads for one item. Journals do not record it."""

    # In the shape that the encoder reads; the maker of the request has checked it.
    array: FloatArray


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One item that the model's encoder turns into vectors (`messages/media.py`)."""

    digest: bytes
    kind: str  # image, video, audio
    length: int  # number of vectors that the encoder returns
    grid: tuple[int, int, int] | None
    values: MediaValues = field(metadata=UNRECORDED)


@dataclass(frozen=True, slots=True)
class MediaVectors(InputOp):
    """Vectors that the model's encoder makes, for V tokens of a step.

    The device keeps encoded items by digest until a plan drops them. In a step it first drops
    items, then encodes items, then takes vectors. Each item whose vectors it takes is encoded in
    this step or was encoded in an earlier one. A plan may drop an item that the device does not
    have. Each piece of a split prefill takes the vectors of its tokens.
    """

    drops_all: bool  # drop every item of earlier steps
    drop: tuple[bytes, ...]  # digests
    encode: tuple[EncoderInput, ...]
    items: tuple[bytes, ...]  # digests of the items whose vectors the step takes
    index: IntArray  # [V] which token of the step, 0..T-1
    item: IntArray  # [V] index in `items`
    row: IntArray  # [V] which vector of the item


@dataclass(frozen=True, slots=True)
class HeardMedia(InputOp):
    """Items that all tokens of a request attend to: before the step, the device writes their keys
    and values to the slots of these rows, where they stay until another plan writes there.

    It drops and encodes items first, like `MediaVectors`.
    """

    drops_all: bool  # drop every item of earlier steps
    drop: tuple[bytes, ...]  # digests
    encode: tuple[EncoderInput, ...]
    items: tuple[bytes, ...]  # [N] digests
    rows: IntArray  # [N] of the row table


@dataclass(frozen=True, slots=True)
class EncodeAhead:
    """Items that the encoder works on after a step, for later steps. The time is limited, so that
    requests that wait for their next token do not wait for a whole large picture.

    The encoder computes at least one piece of the work, and continues where it stopped if the next
    step names the same items. The result names the items that are complete (`Result.encoded`).
    """

    encode: tuple[EncoderInput, ...]  # in this order
    seconds: float
    generation: int  # of the scheduler's accounts of items; the device does not use it

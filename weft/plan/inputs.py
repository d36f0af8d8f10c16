"""Inputs of a step besides token ids."""

from __future__ import annotations

from dataclasses import dataclass

from weft.arrays import FloatArray, IntArray


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

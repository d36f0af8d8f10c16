"""Outputs of simulated requests, from those that a model gave while it was measured.

The longer an output is, the more it repeats itself, and the more guesses of its tokens are right.
So an output is the beginning of one that was measured, never a piece from its middle:

    measured    a b c d e f g h i j k          of the same or a greater length
    simulated   a b c d e f
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from weft.arrays import IntArray
from weft.sim.trace import FIRST_TOKEN

TOKEN_BYTES = 4
# Multiples of these numbers lie evenly between whole numbers, alone and together (roots of
# x^3 = x + 1): so all measured outputs are used about equally often.
SPREAD = (0.7548776662466927, 0.5698402909980532)
LEAST_LONG = 4  # of the longest outputs: the beginning of those that are longer still


class MeasuredOutputs:
    """`outputs`: int32 each, at least one of them with a token. `vocab_size`: of the simulated
    model, whose tokens from `FIRST_TOKEN` on are used."""

    def __init__(self, outputs: Sequence[bytes], vocab_size: int) -> None:
        known = [np.frombuffer(output, dtype=np.int32) for output in outputs if output]
        assert known, "no outputs were measured"
        known.sort(key=len)
        self._outputs = known
        self._lens = [len(output) for output in known]
        self._num_ids = max(vocab_size - FIRST_TOKEN, 1)

    def draw(self, user: int, number: int, length: int) -> bytes:
        """The output of this message of this user: `length` tokens, always the same ones."""
        found = self._beginning(user, number, length)
        while len(found) < length:
            found = np.concatenate([found, self._later(user, number, length - len(found))])
        return self._renamed(found, user, number).tobytes()

    def _beginning(self, user: int, number: int, length: int) -> IntArray:
        first = bisect_left(self._lens, length)
        first = min(first, max(len(self._lens) - LEAST_LONG, 0))
        chosen = self._spread(user, number, len(self._lens) - first)
        return self._outputs[first + chosen][:length]

    def _later(self, user: int, number: int, length: int) -> IntArray:
        """Tokens after those of any measured output: from the later half of a long one."""
        first = max(len(self._lens) - LEAST_LONG, 0)
        chosen = self._spread(user, number + 1, len(self._lens) - first)
        output = self._outputs[first + chosen]
        return output[len(output) // 2 :][:length]

    def _spread(self, user: int, number: int, count: int) -> int:
        """A number below `count`."""
        place = (user + 1) * SPREAD[0] + number * SPREAD[1]
        return int((place % 1.0) * count)

    def _renamed(self, output: IntArray, user: int, number: int) -> IntArray:
        """The output with other tokens in place of its own, equal where they were equal: two
        messages of a chat do not repeat each other because they use the same output."""
        shift = self._spread(user, number, self._num_ids)
        moved = (output - FIRST_TOKEN + shift) % self._num_ids + FIRST_TOKEN
        return moved.astype(np.int32)

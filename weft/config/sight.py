"""Which of the tokens before it a token sees in a layer.

    window of 4     . . . . . o o o x         x: the token; o: seen; .: hidden
    chunks of 4     . . . . | o o o x
                    . . . . | . . . . | x

Every token sees itself. What it sees begins nowhere before what an earlier token sees, so what is
before that is never read again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # descriptions of models are read without numpy
    from weft.arrays import IntArray


class Sight(NamedTuple):
    window: int = 0  # the largest number of tokens that a token sees, itself included; 0: all
    # A token sees those from the last multiple of `window` on, not the last `window`.
    chunked: bool = False

    def first(self, position: int) -> int:
        """The first position that a token at `position` sees."""
        if not self.window:
            return 0
        if self.chunked:
            return position - position % self.window
        return max(position + 1 - self.window, 0)

    def firsts(self, positions: IntArray) -> IntArray:
        """`first` of each of the positions [n]: [n]"""
        if not self.window:
            return positions * 0
        if self.chunked:
            return positions - positions % self.window
        found: IntArray = (positions + 1 - self.window).clip(0)
        return found

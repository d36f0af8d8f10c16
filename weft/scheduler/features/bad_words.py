"""Words that are not to be said: sequences of tokens, whose last one may not follow the others.

Where steps overlap, the planner does not know the token before. So whether a word is about to be
completed is worked out up to the last token but one, and the last one is left to the device, which
knows it (`LogitBias.after`):

    output   ... a  b  c | ?        word  b c d:  "a b" ends with b, so d is forbidden after c
             known    ^ on the device

Words of one token are forbidden always. The prompt does not count: a word is said by the output
alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.plan.logits import ANY, LogitBias
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Feature, StepInputs
from weft.scheduler.request import Columns, Request


class Pair(NamedTuple):
    """A token that may not follow another."""

    after: int  # ANY: it may follow none
    token: int


class _Words:
    """The words of one request, by what must stand before their last two tokens."""

    def __init__(self, words: tuple[tuple[int, ...], ...]) -> None:
        self.longest = max(map(len, words))
        self._first: list[Pair] = []
        self._second: list[Pair] = []
        # Words of three tokens or more, by the last one before the pair.
        self._longer: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) == 1:
                self._first.append(Pair(ANY, word[0]))
            elif len(word) == 2:
                self._second.append(Pair(*word))
            else:
                same_start = self._longer.setdefault(word[-3], [])
                same_start.append(word)

    def forbidden(self, output: list[int], *, has_last: bool) -> list[Pair]:
        """What the device may not sample.

        `output` lacks its last token; without `has_last` there is none.
        """
        if not has_last:
            return self._first
        found = [*self._first, *self._second]
        if not output:
            return found
        for word in self._longer.get(output[-1], ()):
            before = word[:-2]
            if tuple(output[-len(before) :]) == before:
                found.append(Pair(word[-2], word[-1]))
        return found


class BadWordsFeature(Feature):
    """Keeps the words of each row."""

    sampling_fields = ("bad_word_ids",)

    def __init__(self) -> None:
        self._words: dict[int, _Words] = {}

    def enter_row(self, request: Request) -> None:
        words = request.message.sampling.bad_word_ids
        self._words[request.row] = _Words(words)

    def prepare(self, batch: Batch, columns: Columns, step: StepInputs) -> None:
        found = batch.sampling_in(self._words)
        counts: list[int] = []
        pairs: list[Pair] = []
        for row, length in zip(found.rows, found.lens, strict=True):
            forbidden = self._forbidden(row, length, columns)
            counts.append(len(forbidden))
            pairs += forbidden
        if not pairs:
            return
        packed = np.array(pairs, dtype=np.int32)  # [pairs, 2]
        step.logits.append(
            LogitBias(
                index=np.repeat(found.index, counts),
                tokens=packed[:, 1],
                values=np.full(len(pairs), -np.inf, dtype=np.float32),
                after=packed[:, 0],
            )
        )

    def release(self, request: Request) -> None:
        self._words.pop(request.row, None)

    def _forbidden(self, row: int, length: int, columns: Columns) -> list[Pair]:
        """What may not follow the first `length` tokens of a row."""
        words = self._words[row]
        begin = int(columns.prompt_len[row])
        last = length - 1  # position of the output's last token
        # More of the output than the longest word has cannot matter.
        start = max(begin, last - words.longest)
        end = max(begin, last)
        output = columns.tokens[row, start:end].tolist()
        return words.forbidden(output, has_last=last >= begin)

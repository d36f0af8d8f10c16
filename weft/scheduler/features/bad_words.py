"""Bad words: sequences of tokens that the output may not contain, so the last token of a word may
not follow the others.

Where steps overlap, the planner does not know the last token of the output. So this feature
compares the tokens before it, and the device, which knows it, checks the last one
(`LogitBias.after`):

    output   ... a  b  c | ?        word  b c d:  "a b" ends with b, so d is forbidden after c
             known    ^ on the device

Words of one token are always forbidden. Tokens of the prompt do not count.
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

    after: int  # ANY: `token` is always forbidden
    token: int


class _Words:
    """The words of one request, by the token before their last two."""

    def __init__(self, words: tuple[tuple[int, ...], ...]) -> None:
        self.longest = max(map(len, words))
        self._first: list[Pair] = []
        self._second: list[Pair] = []
        # Words of three tokens or more, by the last token before the pair.
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
        """The tokens that the device may not sample, as pairs.

        `output` lacks its last token; without `has_last` the output is empty.
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
        """The tokens that may not follow the first `length` tokens of a row."""
        words = self._words[row]
        begin = int(columns.prompt_len[row])
        last = length - 1  # position of the output's last token
        # Only as many tokens as the longest word has can matter.
        start = max(begin, last - words.longest)
        end = max(begin, last)
        output = columns.tokens[row, start:end].tolist()
        return words.forbidden(output, has_last=last >= begin)

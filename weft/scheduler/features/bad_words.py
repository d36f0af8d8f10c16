"""Words that are not to be said: sequences of tokens, whose last one may not follow the others.

Where steps overlap, the planner does not know the token before. So whether a word is about to be completed is worked
out up to the last token but one, and the last one is left to the device, which knows it (`LogitBias.after`):

    output   ... a  b  c | ?        word  b c d:  "a b" ends with b, so d is forbidden after c
             known    ^ on the device

Words of one token are forbidden always. The prompt does not count: a word is said by the output alone.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import IntArray
from weft.plan.step import ANY, LogitBias
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Extras, Part
from weft.scheduler.request import Columns, Request


class _Words:
    """The words of one request, by what must stand before their last two tokens."""

    def __init__(self, words: tuple[tuple[int, ...], ...]) -> None:
        self._first = [(ANY, word[0]) for word in words if len(word) == 1]
        self._second = self._first + [(word[0], word[1]) for word in words if len(word) == 2]
        self._longer: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 2:
                self._longer.setdefault(word[-3], []).append(word)

    def forbidden(self, output: list[int], has_last: bool) -> list[tuple[int, int]]:
        """Pairs (after which token, which one). `output` lacks its last token; without `has_last` there is none."""
        if not has_last:
            return self._first
        longer = self._longer.get(output[-1], ()) if output else ()
        ending = [word for word in longer if tuple(output[2 - len(word) :]) == word[:-2]]
        return self._second + [(word[-2], word[-1]) for word in ending]


class BadWords(Part):
    """Keeps, by row, the words of requests that have some, and the length of the longest."""

    def __init__(self) -> None:
        self._words: dict[int, tuple[_Words, int]] = {}

    def prepare(self, batch: Batch, columns: Columns, extras: Extras) -> None:
        for request in batch.prefills:
            ids = request.sampling.bad_word_ids
            if ids and request.row not in self._words:
                self._words[request.row] = _Words(ids), max(map(len, ids))
        if not self._words:
            return
        for i, row in enumerate(batch.sample_rows.tolist()):
            if row in self._words:
                words, longest = self._words[row]
                begin, end = (
                    int(columns.prompt_len[row]),
                    int(columns.seq_len[row]) - 2,
                )  # `end`: of the last token
                output = columns.tokens[row, max(begin, end - longest) : max(begin, end)].tolist()
                pairs = words.forbidden(output, has_last=end >= begin)
                if pairs:
                    extras.biases.append(_bias(i, np.array(pairs, dtype=np.int32)))

    def release(self, request: Request) -> None:
        self._words.pop(request.row, None)


def _bias(index: int, pairs: IntArray) -> LogitBias:
    num = len(pairs)
    return LogitBias(
        index=np.full(num, index, dtype=np.int32),
        tokens=pairs[:, 1],
        values=np.full(num, -np.inf, dtype=np.float32),
        after=pairs[:, 0],
    )

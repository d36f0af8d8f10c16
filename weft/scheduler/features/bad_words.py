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

import numpy as np

from weft.plan.logits import ANY, LogitBias
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Feature, StepInputs
from weft.scheduler.request import Columns, Request


class _Words:
    """The words of one request, by what must stand before their last two tokens."""

    def __init__(self, words: tuple[tuple[int, ...], ...]) -> None:
        self.longest = max(map(len, words))
        self._first = [(ANY, word[0]) for word in words if len(word) == 1]
        self._second = self._first + [(word[0], word[1]) for word in words if len(word) == 2]
        self._longer: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 2:
                self._longer.setdefault(word[-3], []).append(word)

    def forbidden(self, output: list[int], *, has_last: bool) -> list[tuple[int, int]]:
        """Pairs (after which token, which one).

        `output` lacks its last token; without `has_last` there is none.
        """
        if not has_last:
            return self._first
        if not output:
            return self._second
        # Words whose tokens before the last two are those that the output ends with.
        longer = self._longer.get(output[-1], ())
        begun = [word for word in longer if tuple(output[2 - len(word) :]) == word[:-2]]
        return self._second + [(word[-2], word[-1]) for word in begun]


class BadWordsFeature(Feature):
    """Keeps the words of each row."""

    sampling_fields = ("bad_word_ids",)

    def __init__(self) -> None:
        self._words: dict[int, _Words] = {}

    def enter_row(self, request: Request) -> None:
        self._words[request.row] = _Words(request.message.sampling.bad_word_ids)

    def prepare(self, batch: Batch, columns: Columns, step: StepInputs) -> None:
        index: list[int] = []
        pairs: list[tuple[int, int]] = []
        for i, row in batch.sampling_in(self._words):
            forbidden = self._forbidden(row, columns)
            index += [i] * len(forbidden)
            pairs += forbidden
        if not pairs:
            return
        after, tokens = np.array(pairs, dtype=np.int32).T
        step.logits.append(
            LogitBias(
                index=np.array(index, dtype=np.int32),
                tokens=tokens,
                values=np.full(len(pairs), -np.inf, dtype=np.float32),
                after=after,
            )
        )

    def release(self, request: Request) -> None:
        self._words.pop(request.row, None)

    def _forbidden(self, row: int, columns: Columns) -> list[tuple[int, int]]:
        words = self._words[row]
        begin = int(columns.prompt_len[row])
        last = int(columns.seq_len[row]) - 2  # position of the output's last token
        start = max(begin, last - words.longest)
        output = columns.tokens[row, start : max(begin, last)].tolist()
        return words.forbidden(output, has_last=last >= begin)

"""How often guesses of the next tokens are right, learnt from texts that a model wrote, and drawn
for simulated ones.

A text that has begun to repeat itself goes on with that, and begins again soon after it has
stopped. So what becomes of a guess depends on the guesses before it, and the longer an output is,
the more of them are right:

    outcomes   . . . . s . . L . . L L L L l . L L L L L L L L L L L     . no guess
    run        0               0   1 2 3 4     1 2 3 4 ...               L right, l wrong
    since                            0       1 2

An output that was measured for 80 tokens tells so what one of 500 is like.

Texts of one model differ: one never repeats itself, another does from its fifth token on. Chances
alone would make them alike. So a simulated text begins with the outcomes of a measured one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from weft.scheduler.speculation.sources import SHORTEST_MATCH
from weft.sim.guesses import (
    LONG_RIGHT,
    LONG_WRONG,
    NO_GUESS,
    RIGHT,
    SHORT_RIGHT,
    SHORT_WRONG,
)

NUM_OUTCOMES = 5
# Classes begin at these numbers.
RUNS = (1, 3, 8, 24)  # of right guesses in a row
HITS = (0, 1, 4, 16)  # right ones so far
SINCE = (0, 4, 16)  # tokens since the last right one, or the beginning
NUM_STATES = len(RUNS) + len(HITS) * len(SINCE)
# What is assumed before anything is measured, as outcomes of 1,000 guesses in the order of their
# numbers: those of SmolLM2-135M-Instruct and weft-nano on random prompts, together.
USUAL = (
    # In a run of right guesses.
    (0, 0, 0, 546, 454),
    (0, 0, 0, 294, 706),
    (0, 0, 0, 54, 946),
    (0, 0, 0, 2, 998),
    # Before the first right one.
    *((960, 27, 12, 1, 1),) * 3,
    # After few, more and many right ones; soon after the last one, later, and much later.
    (817, 65, 59, 15, 44),
    (890, 61, 39, 2, 8),
    (919, 53, 25, 2, 1),
    (699, 68, 99, 23, 111),
    (847, 75, 64, 6, 9),
    (915, 51, 29, 2, 3),
    (365, 42, 220, 30, 343),
    (791, 86, 84, 11, 27),
    (919, 53, 22, 1, 7),
)
WEIGHT = 4.0  # of what is assumed, in guesses of each state
# The same in measured texts: of so many, half of the drawn ones begin with a measured one.
WEIGHT_TEXTS = 2
# Simulated texts are taken from so many that are drawn once, each of so many tokens.
NUM_DRAWN = 256
DRAWN_LEN = 1_024
RANKED_LEN = 128
# Multiples of these numbers lie evenly between integers, alone and together (roots of
# x^3 = x + 1): so texts that repeat themselves are as frequent among few requests as among many.
SPREAD = (0.7548776662466927, 0.5698402909980532)


class GuessModel(msgspec.Struct, frozen=True, kw_only=True):
    """`counts` [states][outcomes]: how often an outcome was seen in a state. `texts`: the outcomes
    of measured texts, a digit for each token."""

    counts: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...] = ()

    @property
    def chances(self) -> NDArray[np.float64]:
        """[states, outcomes] that sum up to 1 in each state."""
        usual = np.array(USUAL, dtype=np.float64)
        usual /= usual.sum(axis=1, keepdims=True)
        seen = np.array(self.counts, dtype=np.float64) + WEIGHT * usual
        found: NDArray[np.float64] = seen / seen.sum(axis=1, keepdims=True)
        return found


class Text(NamedTuple):
    """Token ids, int32 each."""

    prompt: bytes
    output: bytes


class _Position:
    """Where a text stands."""

    def __init__(self) -> None:
        self._run = 0
        self._hits = 0
        self._since = 0

    @property
    def state(self) -> int:
        if self._run:
            return bisect_right(RUNS, self._run) - 1
        hits = bisect_right(HITS, self._hits) - 1
        since = bisect_right(SINCE, self._since) - 1
        return len(RUNS) + hits * len(SINCE) + since

    def go_on(self, outcome: int) -> None:
        """What became of the guess of the next token."""
        if outcome in RIGHT:
            self._run += 1
            self._hits += 1
            self._since = 0
            return
        self._run = 0
        self._since += 1


def learn_guesses(texts: Iterable[Text], *, longest: int, shortest: int) -> GuessModel:
    """What became of guesses in these texts. `longest` and `shortest`: lengths of the pieces that
    are searched for (`--ngram-max`, `--ngram-min`)."""
    counts = np.zeros((NUM_STATES, NUM_OUTCOMES), dtype=np.int64)
    sizes = range(longest, shortest - 1, -1)
    measured = []
    for text in texts:
        position = _Position()
        found = outcomes(text, sizes)
        for outcome in found:
            counts[position.state, outcome] += 1
            position.go_on(outcome)
        measured.append("".join(map(str, found[:DRAWN_LEN])))
    return GuessModel(counts=tuple(tuple(row) for row in counts.tolist()), texts=tuple(measured))


def outcomes(text: Text, sizes: Sequence[int]) -> list[int]:
    """What becomes of a guess of each token of the output: that which followed the last tokens
    where they came before, as many of them as possible (`sizes`)."""
    known = np.frombuffer(text.prompt, dtype=np.int32).tolist()
    output = np.frombuffer(text.output, dtype=np.int32).tolist()
    num_prompt = len(known)
    known += output
    followers: dict[tuple[int, ...], int] = {}  # from a piece to the token that came after it last
    found = []
    for at, token in enumerate(known):
        pieces = [tuple(known[at - size : at]) for size in sizes if size <= at]
        if at >= num_prompt:
            outcome = NO_GUESS
            for piece in pieces:
                guess = followers.get(piece)
                if guess is not None:
                    is_long = len(piece) > SHORTEST_MATCH
                    right, wrong = SHORT_RIGHT, SHORT_WRONG
                    if is_long:
                        right, wrong = LONG_RIGHT, LONG_WRONG
                    outcome = right if guess == token else wrong
                    break
            found.append(outcome)
        for piece in pieces:
            followers[piece] = token
    return found


@lru_cache(maxsize=8)
def drawn_outcomes(model: GuessModel) -> NDArray[np.uint8]:
    """[NUM_DRAWN, DRAWN_LEN] outcomes of texts, those with the fewest right guesses first."""
    rng = np.random.default_rng(0)
    until = [list(accumulate(row[:-1])) for row in model.chances.tolist()]
    found: NDArray[np.uint8] = np.zeros((NUM_DRAWN, DRAWN_LEN), dtype=np.uint8)
    num_measured = len(model.texts)
    num_begun = NUM_DRAWN * num_measured // (num_measured + WEIGHT_TEXTS)
    for number, row in enumerate(found):
        begin = model.texts[number * num_measured // num_begun] if number < num_begun else ""
        position = _Position()
        for at, chance in enumerate(rng.random(DRAWN_LEN).tolist()):
            if at < len(begin):
                outcome = int(begin[at])
            else:
                outcome = bisect_right(until[position.state], chance)
            row[at] = outcome
            position.go_on(outcome)
    num_right = np.isin(found[:, :RANKED_LEN], RIGHT).sum(axis=1)
    return found[np.argsort(num_right, kind="stable")]


def outcomes_for(model: GuessModel, user: int, number: int, length: int) -> bytes:
    """The outcomes of this message of this user, one byte for each of `length` tokens."""
    place = (user + 1) * SPREAD[0] + number * SPREAD[1]
    drawn: bytes = drawn_outcomes(model)[int((place % 1.0) * NUM_DRAWN)].tobytes()
    while len(drawn) < length:
        drawn += drawn[DRAWN_LEN // 2 :]
    return drawn[:length]

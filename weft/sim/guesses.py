"""Guesses of tokens in simulated texts, whose tokens nobody knows. For each token of an output
a script says what becomes of a guess: there is none, it is right, or wrong, after a short or a long
piece that came before. Requests without that are guessed as in a server.
"""

from __future__ import annotations

import numpy as np

from weft.memory.prefix_cache import TOKEN_BYTES
from weft.scheduler.request import Request
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.speculation.planner import SpeculativePlanner
from weft.scheduler.speculation.sources import DraftSource, Known, Repetition
from weft.sim.cost import TrueLengths
from weft.sim.trace import FIRST_TOKEN

NO_GUESS = 0
SHORT_WRONG = 1
SHORT_RIGHT = 2
LONG_WRONG = 3
LONG_RIGHT = 4
RIGHT = (SHORT_RIGHT, LONG_RIGHT)


class ScriptedGuesses:
    """Stands in for a source of repetitions."""

    is_decided = False

    def __init__(self, source: Repetition, lengths: TrueLengths) -> None:
        self.option = source.option
        self.prior = source.prior
        self._source = source
        self._lengths = lengths
        self._own = (LONG_WRONG, LONG_RIGHT) if source.is_long else (SHORT_WRONG, SHORT_RIGHT)

    def drafts(self, known: Known, num_tokens: int) -> bytes:
        number = known.request.id
        script = self._lengths.guesses(number)
        if not script:
            return self._source.drafts(known, num_tokens)
        num_known = len(known.output) // TOKEN_BYTES
        ahead = script[num_known : num_known + num_tokens]
        if not ahead or ahead[0] not in self._own:
            return b""
        first = len(known.tokens) // TOKEN_BYTES
        positions = np.arange(first, first + num_tokens, dtype=np.int32)
        numbers = np.full(num_tokens, number, dtype=np.int64)
        tokens = self._lengths.tokens(numbers, positions)
        num_right = 0
        while num_right < len(ahead) and ahead[num_right] in RIGHT:
            num_right += 1
        others = tokens[num_right:]
        tokens[num_right:] = np.where(others == FIRST_TOKEN, FIRST_TOKEN + 1, FIRST_TOKEN)
        return tokens.tobytes()

    def forget(self, request: Request) -> None:
        pass


def script_guesses(scheduler: Scheduler, lengths: TrueLengths) -> None:
    """Let the outcomes in `lengths` decide which guesses of repetitions are right."""

    def scripted(source: DraftSource) -> DraftSource:
        if isinstance(source, Repetition):
            return ScriptedGuesses(source, lengths)
        return source

    planner = scheduler.planner
    if isinstance(planner, SpeculativePlanner):
        planner.replace_sources(scripted)

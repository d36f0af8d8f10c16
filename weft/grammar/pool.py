"""The grammar service: a cache, one flight for each grammar that is not in it, and a few threads that compile.

    ask ──▶ cache ──▶ verdict                          ┐ all this in the engine's thread, which never waits
     └────▶ flight ──▶ thread: trial, compile ──▶ done ──▶ take ──▶ verdicts
                                     └── ring: the engine wakes up

A grammar is compiled once, however many requests ask for it meanwhile. What is invalid is remembered like what is
valid; what only took too long is not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from weft.grammar.cache import GrammarCache
from weft.grammar.protocol import (
    GOES_ON,
    Compiled,
    Compiler,
    Constraint,
    InvalidGrammar,
    Key,
    Matcher,
    Move,
    Verdict,
    Words,
)
from weft.grammar.trial import NoTrial, Trial, TrialFailed

NUM_THREADS = 2  # one grammar that takes long does not hold up the next


@dataclass(slots=True)
class Flight:
    """A grammar that is being compiled, and who waits for it."""

    future: Future[None]
    ids: list[int] = field(default_factory=list)


class Done(NamedTuple):
    key: Key
    result: Compiled | InvalidGrammar | TrialFailed
    took_s: float


class GrammarPool:
    """`make_compiler` is called once, by a thread, when the first grammar comes; it may raise InvalidGrammar or
    ImportError. `ring` is called by a thread whenever `take` has something to tell. Without `jump` no token is said to
    be forced: each is sampled."""

    def __init__(
        self,
        make_compiler: Callable[[], Compiler],
        *,
        eos_token_ids: Sequence[int],
        max_bytes: int,
        make_trial: Callable[[], Trial] = NoTrial,
        ring: Callable[[], None] = lambda: None,
        jump: bool = True,
    ) -> None:
        self.cache = GrammarCache(max_bytes)
        self.num_compiled = 0
        self._make_compiler = make_compiler
        self._compiler: Compiler | None = None
        self._eos = list(eos_token_ids)
        self._not_eos: Words = np.zeros(0, dtype=np.int32)
        self._lock = threading.Lock()  # for making the compiler
        self._make_trial = make_trial
        self._ring = ring
        self._jump = jump
        self._own = threading.local()  # a thread's trial
        self._trials: list[Trial] = []
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammar", initializer=self._begin_thread)
        self._flights: dict[Key, Flight] = {}
        self._key_of: dict[int, Key] = {}  # of those that wait
        self._verdicts: list[Verdict] = []  # at once
        self._done: deque[Done] = deque()  # written by the threads

    # Compiling

    def ask(self, id: int, key: Key) -> None:
        known = self.cache.get(key)
        if known is not None:
            self._verdicts.append(_verdict(id, known, 0.0))
            return
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = Flight(self._threads.submit(self._work, key))
        flight.ids.append(id)
        self._key_of[id] = key

    def cancel(self, id: int) -> None:
        self._verdicts = [verdict for verdict in self._verdicts if verdict.id != id]
        key = self._key_of.pop(id, None)
        if key is None:
            return
        flight = self._flights[key]
        flight.ids.remove(id)
        if not flight.ids and flight.future.cancel():  # it had not begun; else it is soon in the cache
            del self._flights[key]

    def take(self) -> list[Verdict]:
        verdicts, self._verdicts = self._verdicts, []
        while self._done:
            key, result, took_s = self._done.popleft()
            self.num_compiled += 1
            if not isinstance(result, TrialFailed):
                self.cache.put(key, result)
            for id in self._flights.pop(key).ids:
                del self._key_of[id]
                verdicts.append(_verdict(id, result, took_s))
        return verdicts

    @property
    def has_news(self) -> bool:
        """Whether `take` has something to tell."""
        return bool(self._verdicts or self._done)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for trial in self._trials:
            trial.close()

    def _work(self, key: Key) -> None:
        """In a thread."""
        began = time.perf_counter()
        result: Compiled | InvalidGrammar | TrialFailed
        try:
            self._own.trial.run(key)
            result = self._the_compiler().compile(key)
        except (InvalidGrammar, TrialFailed) as exc:
            result = exc
        except ImportError as exc:
            result = TrialFailed(str(exc))
        except BaseException as exc:  # a panic of the library is no Exception
            result = TrialFailed(f"the grammar library failed on it: {type(exc).__name__}")
        self._done.append(Done(key, result, time.perf_counter() - began))
        self._ring()

    def _begin_thread(self) -> None:
        self._own.trial = self._make_trial()
        self._trials.append(self._own.trial)

    def _the_compiler(self) -> Compiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = self._make_compiler()
            return self._compiler

    # Following

    def advance(self, constraints: Sequence[Constraint], tokens: Sequence[int], room: Sequence[int]) -> list[Move]:
        moves = [_taken(constraint.matcher, (token,)) for constraint, token in zip(constraints, tokens, strict=True)]
        going = [i for i, move in enumerate(moves) if move is GOES_ON]
        lone = self._look(constraints, moves, going)
        if self._jump:
            jumped = [i for i in lone if room[i] and _jumps(constraints[i].matcher, room[i], moves, i)]
            self._look(constraints, moves, jumped)
        return moves

    def _look(self, constraints: Sequence[Constraint], moves: list[Move], places: Sequence[int]) -> list[int]:
        """Find out what may come next at `places`, and whether anything may. Returns those where only one token, or a
        few that stand side by side, may: where a text is forced, masks allow but its first token."""
        if not places:
            return []
        masks = np.zeros((len(places), len(constraints[0].mask)), dtype=np.int32)
        self._fill([constraints[i].matcher for i in places], masks)
        goes_on = masks & self._others(masks.shape[1])  # without those that only end the output
        numbers = np.count_nonzero(goes_on, axis=1).tolist()  # of words that allow something
        lone = []
        for i, mask, number in zip(places, masks, numbers, strict=True):
            constraint = constraints[i]
            constraint.mask = mask
            if not number or constraint.matcher.error:
                move = _move(constraint.matcher, is_empty=not mask.any())
                moves[i] = move if move.error else Move(is_complete=True, forced=moves[i].forced)
            elif number == 1 and moves[i] is GOES_ON:
                lone.append(i)
        return lone

    def _fill(self, matchers: Sequence[Matcher], masks: Words) -> None:
        """All at once; if that fails, one by one: then only those that fail have an empty mask."""
        assert self._compiler is not None
        try:
            self._compiler.fill(matchers, masks)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of the library is no Exception
            masks[:] = 0
            if len(matchers) > 1:
                for i, matcher in enumerate(matchers):
                    self._fill([matcher], masks[i : i + 1])

    def _others(self, num_words: int) -> Words:
        """[W] bits of the tokens that do not end the output."""
        if len(self._not_eos) != num_words:
            bits = np.ones(32 * num_words, dtype=np.bool_)
            bits[self._eos] = False
            self._not_eos = np.packbits(bits, bitorder="little").view(np.int32)
        return self._not_eos


def _taken(matcher: Matcher, tokens: Sequence[int]) -> Move:
    """A matcher takes tokens."""
    goes_on = False
    try:
        for token in tokens:
            goes_on = matcher.consume(token)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as exc:  # a panic of the library is no Exception
        return _failed(exc)
    return GOES_ON if goes_on else _move(matcher)


def _jumps(matcher: Matcher, room: int, moves: list[Move], place: int) -> bool:
    """A matcher takes what must follow, if there is such. Returns whether something may come behind it."""
    try:
        forced = tuple(matcher.forced()[:room])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as exc:  # a panic of the library is no Exception
        moves[place] = _failed(exc)
        return False
    if not forced:
        return False
    move = _taken(matcher, forced)
    moves[place] = move if move.error else move._replace(forced=forced)
    return not (move.error or move.is_complete)


def _failed(exc: BaseException) -> Move:
    return Move(error=f"the grammar library failed on it: {type(exc).__name__}")


def _move(matcher: Matcher, *, is_empty: bool = False) -> Move:
    """`is_empty`: its mask allows nothing at all."""
    if matcher.error or is_empty:
        return Move(error=f"the output cannot go on in its grammar: {matcher.error or 'nothing may follow'}")
    return Move(is_complete=matcher.is_complete)


def _verdict(id: int, result: Compiled | InvalidGrammar | TrialFailed, took_s: float) -> Verdict:
    if isinstance(result, Compiled):
        constraint = Constraint(result.matcher.fork(), result.mask)
        return Verdict(id, constraint, warnings=result.warnings, compile_s=took_s)
    kind = "the grammar is invalid: " if isinstance(result, InvalidGrammar) else ""
    return Verdict(id, None, message=f"{kind}{result}", status=400, compile_s=took_s)

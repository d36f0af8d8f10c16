"""The grammar service: a cache, one flight for each grammar that is not in it, a few threads that compile, and one
that fills masks.

    ask ──▶ cache ──▶ verdict                          ┐ all this in the engine's thread, which never waits
     └────▶ flight ──▶ thread: trial, compile ──▶ done ──▶ take ──▶ verdicts
                                     └── notify: the engine wakes up

A grammar is compiled once, however many requests ask for it meanwhile. Tenants take turns, and a grammar that is long
by its text leaves a thread to the others; the time that one waits is not counted to its work. What is invalid is
remembered like what is valid; what only took too long is not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from weft.config.rotation import Rotation
from weft.grammar.cache import GrammarCache
from weft.grammar.masks import LazyBitmaskRow, LazyBitmasks, Words
from weft.grammar.protocol import (
    CONTINUE,
    NOT_FOLLOWED,
    Advance,
    Compiled,
    Compiler,
    CompileResult,
    Constraint,
    GrammarMatcher,
    InvalidGrammar,
    Key,
)
from weft.grammar.sandbox import CompileSandbox, NoSandbox, SandboxFailed

NUM_THREADS = 2  # one grammar that takes long does not hold up the next
LONG_LEN = 65_536  # characters of a grammar that does not take the last thread
WAIT_S = 10.0  # for a thread; who has waited longer is told to come back
FEW = 4  # masks: to fill less takes no longer than to wake a thread
PART = 8  # masks that are filled in one go: the thread begins with the first of them, who asks with the last


class CompileOverloaded(Exception):
    """The grammar has waited too long for a thread. The message is for the user, who may try again."""


@dataclass(slots=True, eq=False)
class PendingCompile:
    """A grammar that is compiled or waits for it, and who waits for it."""

    key: Key
    tenant: str  # of who asked first
    asked_s: float
    ids: list[int] = field(default_factory=list)

    @property
    def is_long(self) -> bool:
        return len(self.key.text) > LONG_LEN


CompileOutcome: TypeAlias = Compiled | InvalidGrammar | SandboxFailed | CompileOverloaded


class FinishedCompile(NamedTuple):
    key: Key
    result: CompileOutcome
    took_s: float


class GrammarPool:
    """`make_compiler` is called once, by a thread, when the first grammar comes; it may raise InvalidGrammar or
    ImportError. `notify` is called by a thread whenever `take` has something to tell. Without `jump` no token is said to
    be forced: each is sampled. With `beside`, for who computes elsewhere than in this machine's processors, a thread
    fills masks while a step runs; without it, who asks for them does."""

    def __init__(
        self,
        make_compiler: Callable[[], Compiler],
        *,
        max_bytes: int,
        make_sandbox: Callable[[], CompileSandbox] = NoSandbox,
        notify: Callable[[], None] = lambda: None,
        jump: bool = True,
        beside: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = GrammarCache(max_bytes)
        self.num_compiled = 0
        self._make_compiler = make_compiler
        self._compiler: Compiler | None = None
        self._lock = threading.Lock()  # for making the compiler
        self._make_sandbox = make_sandbox
        self._notify = notify
        self._jump = jump
        self._beside = beside
        self._own = threading.local()  # a thread's trial
        self._trials: list[CompileSandbox] = []
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammar", initializer=self._begin_thread)
        self._filler = ThreadPoolExecutor(1, "masks")
        self._clock = clock
        self._queue = _Queue()
        self._flights: dict[Key, PendingCompile] = {}
        self._key_of: dict[int, Key] = {}  # of those that wait
        self._verdicts: list[CompileResult] = []  # at once
        self._done: deque[FinishedCompile] = deque()  # written by the threads

    # Compiling

    def ask(self, id: int, key: Key, tenant: str = "") -> None:
        known = self.cache.get(key)
        if known is not None:
            self._verdicts.append(_verdict(id, known, 0.0))
            return
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = PendingCompile(key, tenant, self._clock())
            self._queue.put(flight)
            self._threads.submit(self._work)
        flight.ids.append(id)
        self._key_of[id] = key

    def cancel(self, id: int) -> None:
        self._verdicts = [verdict for verdict in self._verdicts if verdict.id != id]
        key = self._key_of.pop(id, None)
        if key is None:
            return
        flight = self._flights[key]
        flight.ids.remove(id)
        if not flight.ids and self._queue.remove(
            flight
        ):  # it had not begun; else it is soon in the cache
            del self._flights[key]

    def take(self) -> list[CompileResult]:
        verdicts, self._verdicts = self._verdicts, []
        while self._done:
            key, result, took_s = self._done.popleft()
            self.num_compiled += 1
            if not isinstance(result, SandboxFailed | CompileOverloaded):
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
        self._filler.shutdown(cancel_futures=True)
        for trial in self._trials:
            trial.close()

    def _work(self) -> None:
        """In a thread: what waits, as long as there is something that it may take."""
        while (flight := self._queue.take()) is not None:
            began = time.perf_counter()
            if self._clock() - flight.asked_s > WAIT_S:
                result: CompileOutcome = CompileOverloaded(
                    "there are more grammars to compile than can be done; try again later"
                )
            else:
                result = self._compiled(flight.key)
            self._queue.ended(flight)
            self._done.append(FinishedCompile(flight.key, result, time.perf_counter() - began))
            self._notify()

    def _compiled(self, key: Key) -> CompileOutcome:
        try:
            self._own.trial.run(key)
            return self._the_compiler().compile(key)
        except (InvalidGrammar, SandboxFailed) as exc:
            return exc
        except ImportError as exc:
            return SandboxFailed(str(exc))
        except BaseException as exc:  # a panic of the library is no Exception
            return SandboxFailed(f"the grammar library failed on it: {type(exc).__name__}")

    def _begin_thread(self) -> None:
        self._own.trial = self._make_sandbox()
        self._trials.append(self._own.trial)

    def _the_compiler(self) -> Compiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = self._make_compiler()
            return self._compiler

    # Following

    def advance(
        self, constraints: Sequence[Constraint], tokens: Sequence[int], room: Sequence[int]
    ) -> list[Advance]:
        moves, going = [], []
        for constraint, token, most in zip(constraints, tokens, room, strict=True):
            constraint.mask.masks.finish()
            move = _taken(constraint.matcher, (token,))
            if move is CONTINUE and self._jump and most:
                move = _jumped(constraint.matcher, most)
            moves.append(move)
            if not (move.is_complete or move.error):
                going.append(constraint)
        if going:
            self._look(going)
        return moves

    def _look(self, constraints: Sequence[Constraint]) -> None:
        """Begin to find out what may come next. Without the thread, and of a few masks, that is left to who asks."""
        num, num_words = len(constraints), constraints[0].mask.masks.words.shape[1]
        size, parts = max(PART, -(-num // 4)) if self._beside else num, []
        for begin in range(0, num, size):
            part = constraints[begin : begin + size]
            words = np.zeros((len(part), num_words), dtype=np.int32)
            masks = LazyBitmasks(
                words, partial(self._filled, [constraint.matcher for constraint in part])
            )
            for place, constraint in enumerate(part):
                constraint.mask = LazyBitmaskRow(masks, place)
            parts.append(masks)
        if self._beside and num >= FEW:
            self._filler.submit(_finish, parts)

    def _filled(self, matchers: Sequence[GrammarMatcher], masks: Words) -> dict[int, str]:
        """Fill them, mostly in a thread. Returns the rows where an output cannot go on, and why."""
        self._fill(matchers, masks)
        allows = np.count_nonzero(masks, axis=1).tolist()  # how many words that allow something
        errors = [matcher.error for matcher in matchers]
        return {i: _stuck(error) for i, error in enumerate(errors) if error or not allows[i]}

    def _fill(self, matchers: Sequence[GrammarMatcher], masks: Words) -> None:
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


class _Queue:
    """Flights that wait, for several threads. Tenants take turns, and long grammars leave a thread to the others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = Rotation[PendingCompile]()
        self._num_long = 0  # that are being compiled

    def put(self, flight: PendingCompile) -> None:
        with self._lock:
            self._waiting.put(flight.tenant, flight, is_long=flight.is_long)

    def take(self) -> PendingCompile | None:
        """The next that may begin. It has to be `ended`."""
        with self._lock:
            flight = self._waiting.take(with_long=self._num_long < max(NUM_THREADS - 1, 1))
            if flight is not None:
                self._num_long += flight.is_long
            return flight

    def ended(self, flight: PendingCompile) -> None:
        with self._lock:
            self._num_long -= flight.is_long

    def remove(self, flight: PendingCompile) -> bool:
        """Whether it had not begun."""
        with self._lock:
            return self._waiting.remove(flight.tenant, flight)


def _finish(parts: Sequence[LazyBitmasks]) -> None:
    for masks in parts:
        masks.finish()


def _taken(matcher: GrammarMatcher, tokens: Sequence[int]) -> Advance:
    """A matcher takes tokens."""
    goes_on = False
    try:
        for token in tokens:
            goes_on = matcher.consume(token)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as exc:  # a panic of the library is no Exception
        return _failed(exc)
    return CONTINUE if goes_on else _move(matcher)


def _jumped(matcher: GrammarMatcher, room: int) -> Advance:
    """A matcher takes what must follow, if there is such."""
    try:
        forced = tuple(matcher.forced()[:room])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as exc:  # a panic of the library is no Exception
        return _failed(exc)
    if not forced:
        return CONTINUE
    move = _taken(matcher, forced)
    return move if move.error else move._replace(forced=forced)


def _failed(exc: BaseException) -> Advance:
    return Advance(error=f"the grammar library failed on it: {type(exc).__name__}")


def _move(matcher: GrammarMatcher) -> Advance:
    """Nothing may follow."""
    return Advance(error=_stuck(matcher.error)) if matcher.error else Advance(is_complete=True)


def _stuck(error: str) -> str:
    return (
        f"{NOT_FOLLOWED}: {error}"
        if error
        else "the output cannot go on in its grammar: nothing may follow"
    )


def _verdict(id: int, result: CompileOutcome, took_s: float) -> CompileResult:
    if isinstance(result, Compiled):
        constraint = Constraint(
            result.matcher.fork(), LazyBitmaskRow(LazyBitmasks(result.mask[None]))
        )
        return CompileResult(id, constraint, warnings=result.warnings, compile_s=took_s)
    kind = "the grammar is invalid: " if isinstance(result, InvalidGrammar) else ""
    status = 503 if isinstance(result, CompileOverloaded) else 400
    return CompileResult(id, None, message=f"{kind}{result}", status=status, compile_s=took_s)

"""The grammar service: a cache, threads that compile missing grammars, a thread that fills masks.

    ask ──▶ cache ──▶ CompileResult                      ┐ all this in the engine's thread,
     └────▶ PendingCompile ──▶ thread ──▶ done ──▶ take  ┘ which never waits
                               sandbox, compile
                                  └── notify: the engine wakes up

A grammar is compiled once, even if several requests ask for it in the meantime. Tenants take turns,
and grammars with long text leave one thread free for others; the time that a grammar waits does not
count as its work. The cache keeps errors of invalid grammars, too, but not timeouts. This module
knows grammar libraries only through the protocol.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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

NUM_THREADS = 2  # one slow grammar does not delay the next
LONG_LEN = 65_536  # characters; longer grammars never occupy all threads
WAIT_S = 10.0  # a grammar that has waited longer for a thread is refused for now
FEW = 4  # masks: to fill fewer takes no longer than to wake a thread
PART = 8  # masks filled in one go: the thread begins with the first part, the sampler with the last


class CompileOverloaded(Exception):
    """The grammar waited too long for a thread. The message is for the user, who may retry."""


@dataclass(slots=True, eq=False)
class PendingCompile:
    """A grammar that is being compiled or waits for it, and the requests that wait for the
    result."""

    key: Key
    tenant: str  # of the first request that asked
    asked_s: float
    ids: list[int] = field(default_factory=list)

    @property
    def is_long(self) -> bool:
        return len(self.key.text) > LONG_LEN


CompileOutcome: TypeAlias = Compiled | InvalidGrammar | SandboxFailed | CompileOverloaded


class FinishedCompile(NamedTuple):
    key: Key
    outcome: CompileOutcome
    took_s: float


class GrammarPool:
    """The grammar service of one engine. Only the engine's thread calls its public methods."""

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
        """`max_bytes` is the limit of the cache.

        A thread calls `make_compiler` once, for `prepare` or the first grammar; it may raise
        InvalidGrammar or ImportError. Each compiling thread makes its own sandbox. A thread calls
        `notify` whenever `take` has a new result. Without `jump` no token is forced: each is
        sampled. With `beside`, for a model that does not compute on this machine's processors, a
        thread fills masks while a step runs; without it, the sampler fills them.
        """
        self.cache = GrammarCache(max_bytes)
        self.num_compiled = 0
        self._threads = _CompilerThreads(make_compiler, make_sandbox, notify, clock)
        self._jump = jump
        self._beside = beside
        self._filler = ThreadPoolExecutor(1, "masks")
        self._clock = clock
        self._pending: dict[Key, PendingCompile] = {}
        self._key_of: dict[int, Key] = {}  # of waiting requests
        self._from_cache: list[CompileResult] = []  # not taken yet

    # ---- compiling

    def prepare(self) -> None:
        """Make the compiler in a thread, if it is not made yet.

        While a library loads a vocabulary (5 µs a token) it may hold the interpreter's lock: no
        step can run. So the caller chooses a moment in which nobody waits for one.
        """
        self._threads.prepare()

    def ask(self, id: int, key: Key, tenant: str = "") -> None:
        known = self.cache.get(key)
        if known is not None:
            self._from_cache.append(_result(id, known, 0.0))
            return
        pending = self._pending.get(key)
        if pending is None:
            pending = PendingCompile(key, tenant, self._clock())
            self._pending[key] = pending
            self._threads.put(pending)
        pending.ids.append(id)
        self._key_of[id] = key

    def cancel(self, id: int) -> None:
        self._from_cache = [result for result in self._from_cache if result.id != id]
        key = self._key_of.pop(id, None)
        if key is None:
            return
        pending = self._pending[key]
        pending.ids.remove(id)
        # A running compilation continues: its result will soon be in the cache.
        if not pending.ids and self._threads.remove(pending):
            del self._pending[key]

    def take(self) -> list[CompileResult]:
        results = self._from_cache
        self._from_cache = []
        for key, outcome, took_s in self._threads.take():
            self.num_compiled += 1
            # A grammar that timed out may compile faster another time.
            if not isinstance(outcome, SandboxFailed | CompileOverloaded):
                self.cache.put(key, outcome)
            for id in self._pending.pop(key).ids:
                del self._key_of[id]
                results.append(_result(id, outcome, took_s))
        return results

    @property
    def has_news(self) -> bool:
        """Whether `take` has something to report."""
        return bool(self._from_cache or self._threads.done)

    def close(self) -> None:
        self._threads.close()
        self._filler.shutdown(cancel_futures=True)

    # ---- following

    def advance(
        self,
        constraints: Sequence[Constraint],
        tokens: Sequence[int],
        room: Sequence[int],
    ) -> list[Advance]:
        advances: list[Advance] = []
        # by id(): a constraint may take several tokens in one call
        continuing: dict[int, Constraint] = {}
        for constraint, token, most in zip(constraints, tokens, room, strict=True):
            constraint.mask.masks.finish()  # a thread may still use its matcher to fill the mask
            advance = _consume(constraint.matcher, (token,))
            if advance is CONTINUE and self._jump and most:
                advance = _jump(constraint.matcher, most)
            advances.append(advance)
            if advance.is_complete or advance.error:
                continuing.pop(id(constraint), None)
            else:
                continuing[id(constraint)] = constraint
        if continuing:
            self._renew_masks(list(continuing.values()))
        return advances

    def follow(
        self, constraint: Constraint, tokens: Sequence[int], *, jumps: bool
    ) -> list[LazyBitmaskRow]:
        constraint.mask.masks.finish()  # a thread may still use its matcher to fill the mask
        matchers = _ahead(constraint.matcher, tokens, jumps=jumps and self._jump)
        if not matchers:
            return []
        num_words = constraint.mask.masks.words.shape[1]
        words = np.zeros((len(matchers), num_words), dtype=np.int32)
        masks = LazyBitmasks(words, partial(self._fill, matchers))
        if self._beside and len(matchers) >= FEW:
            self._filler.submit(_finish, [masks])
        return [LazyBitmaskRow(masks, row) for row in range(len(matchers))]

    def _renew_masks(self, constraints: Sequence[Constraint]) -> None:
        """Begin to compute the masks of the next tokens.

        Without the thread, or for few masks, the sampler fills them.
        """
        num_masks = len(constraints)
        num_words = constraints[0].mask.masks.words.shape[1]
        # Several small parts let the thread and the sampler work from both ends at once.
        part_size = num_masks
        if self._beside:
            part_size = max(PART, -(-num_masks // 4))
        parts: list[LazyBitmasks] = []
        for begin in range(0, num_masks, part_size):
            part = constraints[begin : begin + part_size]
            matchers = [constraint.matcher for constraint in part]
            words = np.zeros((len(part), num_words), dtype=np.int32)
            masks = LazyBitmasks(words, partial(self._fill, matchers))
            for index, constraint in enumerate(part):
                constraint.mask = LazyBitmaskRow(masks, index)
            parts.append(masks)
        if self._beside and num_masks >= FEW:
            self._filler.submit(_finish, parts)

    def _fill(self, matchers: Sequence[GrammarMatcher], masks: Words) -> dict[int, str]:
        """Fill `masks` [M, W], normally in a thread.

        Returns the rows whose outputs cannot continue, with the reasons.
        """
        self._fill_words(matchers, masks)
        num_used_words = np.count_nonzero(masks, axis=1).tolist()
        # A limit of the library may be exceeded only here, while the mask is computed.
        faults: dict[int, str] = {}
        for row, matcher in enumerate(matchers):
            error = matcher.error
            if error or not num_used_words[row]:
                faults[row] = _stuck(error)
        return faults

    def _fill_words(self, matchers: Sequence[GrammarMatcher], masks: Words) -> None:
        """Fill all masks at once; if that fails, one by one, so that only failing ones have an
        empty mask."""
        try:
            self._threads.compiler.fill(matchers, masks)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of the library is not an Exception
            masks[:] = 0
            if len(matchers) > 1:
                for i, matcher in enumerate(matchers):
                    self._fill_words([matcher], masks[i : i + 1])


class _CompilerThreads:
    """The threads that compile, and the grammars that wait for a thread."""

    def __init__(
        self,
        make_compiler: Callable[[], Compiler],
        make_sandbox: Callable[[], CompileSandbox],
        notify: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        # compiling threads append, the engine's thread takes
        self.done: deque[FinishedCompile] = deque()
        self._make_compiler = make_compiler
        self._made: Compiler | None = None
        self._making = threading.Lock()  # locked while the compiler is made
        self._make_sandbox = make_sandbox
        self._own = threading.local()  # the sandbox of each thread
        self._sandboxes: list[CompileSandbox] = []
        self._notify = notify
        self._clock = clock
        self._queue = _Queue()
        self._pool = ThreadPoolExecutor(NUM_THREADS, "grammar", initializer=self._begin_thread)

    @property
    def compiler(self) -> Compiler:
        """The compiler. The first thread that needs it makes it, so it exists after any
        compilation."""
        with self._making:
            if self._made is None:
                self._made = self._make_compiler()
            return self._made

    def prepare(self) -> None:
        self._pool.submit(self._prepare)

    def put(self, pending: PendingCompile) -> None:
        self._queue.put(pending)
        self._pool.submit(self._work)

    def remove(self, pending: PendingCompile) -> bool:
        """Remove a pending grammar. Returns False if its compilation has begun."""
        return self._queue.remove(pending)

    def take(self) -> list[FinishedCompile]:
        finished: list[FinishedCompile] = []
        while self.done:
            finished.append(self.done.popleft())
        return finished

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for sandbox in self._sandboxes:
            sandbox.close()

    # ---- in the threads

    def _begin_thread(self) -> None:
        self._own.sandbox = self._make_sandbox()
        self._sandboxes.append(self._own.sandbox)

    def _prepare(self) -> None:
        # If it cannot be made, each grammar is refused with the reason.
        with suppress(Exception):
            _ = self.compiler

    def _work(self) -> None:
        """Compile waiting grammars, as long as there is one that this thread may take."""
        while (pending := self._queue.take()) is not None:
            began = time.perf_counter()
            outcome: CompileOutcome
            if self._clock() - pending.asked_s > WAIT_S:
                outcome = CompileOverloaded(
                    "too many grammars wait to be compiled; try again later"
                )
            else:
                outcome = self._compile(pending.key)
            self._queue.finish(pending)
            took_s = time.perf_counter() - began
            self.done.append(FinishedCompile(pending.key, outcome, took_s))
            self._notify()

    def _compile(self, key: Key) -> CompileOutcome:
        try:
            self._own.sandbox.run(key)
            return self.compiler.compile(key)
        except (InvalidGrammar, SandboxFailed) as exc:
            return exc
        except ImportError as exc:
            return SandboxFailed(str(exc))
        except BaseException as exc:  # a panic of the library is not an Exception
            return SandboxFailed(_library_failed(exc))


class _Queue:
    """Waiting grammars, for several threads.

    Tenants take turns, and long grammars leave one thread free for others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = Rotation[PendingCompile]()
        self._num_long = 0  # long grammars that are being compiled

    def put(self, pending: PendingCompile) -> None:
        with self._lock:
            self._waiting.put(pending.tenant, pending, is_long=pending.is_long)

    def take(self) -> PendingCompile | None:
        """The next grammar that may begin, or None. The caller must `finish` it."""
        with self._lock:
            has_room_for_long = self._num_long < max(NUM_THREADS - 1, 1)
            pending = self._waiting.take(with_long=has_room_for_long)
            if pending is not None:
                self._num_long += pending.is_long
            return pending

    def finish(self, pending: PendingCompile) -> None:
        with self._lock:
            self._num_long -= pending.is_long

    def remove(self, pending: PendingCompile) -> bool:
        """Remove a pending grammar. Returns False if its compilation has begun."""
        with self._lock:
            return self._waiting.remove(pending.tenant, pending)


def _finish(parts: Sequence[LazyBitmasks]) -> None:
    for masks in parts:
        masks.finish()


def _consume(matcher: GrammarMatcher, tokens: Sequence[int]) -> Advance:
    """Let the matcher consume tokens."""
    continues = False
    try:
        for token in tokens:
            continues = matcher.consume(token)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as exc:  # a panic of the library is not an Exception
        return Advance(error=_library_failed(exc))
    if continues:
        return CONTINUE
    if matcher.error:
        return Advance(error=_stuck(matcher.error))
    return Advance(is_complete=True)


def _jump(matcher: GrammarMatcher, room: int) -> Advance:
    """Let the matcher consume the forced tokens, if there are any."""
    try:
        forced = tuple(matcher.forced()[:room])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as exc:  # a panic of the library is not an Exception
        return Advance(error=_library_failed(exc))
    if not forced:
        return CONTINUE
    advance = _consume(matcher, forced)
    if advance.error:
        return advance
    return advance._replace(forced=forced)


def _ahead(matcher: GrammarMatcher, tokens: Sequence[int], *, jumps: bool) -> list[GrammarMatcher]:
    """Forks of a matcher, one after each of the tokens, up to the first token that is not allowed
    or leaves no choice after it."""
    found: list[GrammarMatcher] = []
    try:
        for token in tokens:
            matcher = matcher.fork()
            if not matcher.consume(token) or (jumps and matcher.forced()):
                break
            found.append(matcher)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic of the library is not an Exception; the draft ends there
        return found
    return found


def _library_failed(exc: BaseException) -> str:
    return f"the grammar library failed on it: {type(exc).__name__}"


def _stuck(error: str) -> str:
    if error:
        return f"{NOT_FOLLOWED}: {error}"
    return "the output cannot go on in its grammar: nothing may follow"


def _result(id: int, outcome: CompileOutcome, took_s: float) -> CompileResult:
    if isinstance(outcome, Compiled):
        first_mask = LazyBitmasks(outcome.mask[None])
        constraint = Constraint(outcome.matcher.fork(), LazyBitmaskRow(first_mask))
        return CompileResult(id, constraint, warnings=outcome.warnings, compile_s=took_s)
    message = str(outcome)
    if isinstance(outcome, InvalidGrammar):
        message = f"the grammar is invalid: {message}"
    status = 503 if isinstance(outcome, CompileOverloaded) else 400
    return CompileResult(id, None, message=message, status=status, compile_s=took_s)

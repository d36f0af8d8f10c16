"""Grammars: what compiles them, what follows them, and the service that the scheduler asks.

    Compiler         a grammar library for one vocabulary: text in, a Compiled out; fills masks
    GrammarMatcher   the place of one output in its grammar
    Grammars         the service: `ask` begins to compile, `take` reports the end; no call waits

Twins: `llg.py` (llguidance), `xgr.py` (xgrammar) and `choice.py` (plain Python, for tests) compile;
`pool.py` is the service, and the journal's replay repeats its reports. What may come next is said
in masks (`masks.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from weft.grammar.masks import LazyBitmaskRow, Words

# The beginning of the error of an output whose grammar is too hard, or is left.
NOT_FOLLOWED = "the grammar cannot be followed"


class InvalidGrammar(ValueError):
    """No output can be held to this grammar, now or ever. The message is for the user."""


class Key(NamedTuple):
    """A grammar. Equal ones are compiled once."""

    kind: str  # json_schema, regex, choice, ebnf, structural_tag
    text: str
    strict: bool = False  # refuse what cannot be enforced, instead of leaving it out


class GrammarMatcher(Protocol):
    """A matcher that cannot go on has an `error`, for ever; it does not raise."""

    @property
    def error(self) -> str: ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow any more but the end of the output."""
        ...

    def fork(self) -> GrammarMatcher:
        """Another one at the same place."""
        ...

    def consume(self, token: int) -> bool:
        """Take a token. Returns whether more may follow: not complete, and no error."""
        ...

    def forced(self) -> list[int]:
        """The tokens of the text that must follow, as the tokenizer would write it.

        [] if there is a choice. The last ones are left out if the text behind them might change
        how they are written.
        """
        ...


@dataclass(frozen=True, slots=True)
class Compiled:
    matcher: GrammarMatcher  # at the beginning: to be forked
    mask: Words  # [W] of the first token
    num_bytes: int  # memory that it takes, about
    warnings: tuple[str, ...] = ()  # what of the grammar is not enforced


class Compiler(Protocol):
    def compile(self, key: Key) -> Compiled:
        """Raises InvalidGrammar."""
        ...

    def fill(self, matchers: Sequence[GrammarMatcher], masks: Words) -> None:
        """Write into masks [M, W] what may come next.

        The row of a matcher with an error means nothing.
        """
        ...


@dataclass(slots=True)
class Constraint:
    """One request's place in its grammar, and what may come next there.

    No thread touches the matcher while another fills its mask.
    """

    matcher: GrammarMatcher
    mask: LazyBitmaskRow


class CompileResult(NamedTuple):
    """The answer to one `ask`: a constraint, or the reason why there is none."""

    id: int
    constraint: Constraint | None
    warnings: tuple[str, ...] = ()
    message: str = ""
    status: int = 200  # as an HTTP status: 400 is the grammar's fault
    compile_s: float = 0.0  # 0: it was compiled already


class Advance(NamedTuple):
    """What one token did to its grammar. With an error nothing is forced."""

    is_complete: bool = False  # nothing may follow it, and the forced tokens
    # An error that is found only when the mask is filled is among `LazyBitmasks.faults`.
    error: str = ""
    forced: tuple[int, ...] = ()  # tokens that had to follow: the matcher has taken them, too


CONTINUE = Advance()


class Grammars(Protocol):
    """Called from one thread, which never waits for a compilation."""

    def ask(self, id: int, key: Key, tenant: str = "") -> None:
        """Compile a grammar for request `id` of `tenant`. `take` reports the result."""
        ...

    def cancel(self, id: int) -> None:
        """The request has ended: do not report its result."""
        ...

    def take(self) -> list[CompileResult]:
        """The results since the last call."""
        ...

    def advance(
        self,
        constraints: Sequence[Constraint],
        tokens: Sequence[int],
        room: Sequence[int],
    ) -> list[Advance]:
        """Give each constraint its token, then up to `room` tokens that must follow.

        A constraint may be named several times, and takes its tokens in this order. This begins to
        fill the masks of what may come next. Where an earlier mask is still being filled, it is
        waited for first.
        """
        ...

    def follow(
        self, constraint: Constraint, tokens: Sequence[int], *, jumps: bool
    ) -> list[LazyBitmaskRow]:
        """What might come next behind each of some tokens that are only guessed; the place of the
        constraint stays.

        The first n of the tokens have a mask: those that are allowed and leave a choice behind
        them. There is none where the output would be complete, nor, with `jumps`, where tokens
        must follow.
        """
        ...


class NoGrammars:
    """Compiles nothing: every request that asks is refused with `reason`."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._asked: list[int] = []

    def ask(self, id: int, key: Key, tenant: str = "") -> None:
        self._asked.append(id)

    def cancel(self, id: int) -> None:
        if id in self._asked:
            self._asked.remove(id)

    def take(self) -> list[CompileResult]:
        asked = self._asked
        self._asked = []
        return [CompileResult(id, None, message=self._reason, status=400) for id in asked]

    def advance(
        self,
        constraints: Sequence[Constraint],
        tokens: Sequence[int],
        room: Sequence[int],
    ) -> list[Advance]:
        raise AssertionError("there is no constraint")

    def follow(
        self, constraint: Constraint, tokens: Sequence[int], *, jumps: bool
    ) -> list[LazyBitmaskRow]:
        raise AssertionError("there is no constraint")

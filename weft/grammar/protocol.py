"""Grammars: compilers, matchers, and the service that the scheduler uses.

    Compiler         a grammar library for one vocabulary: text in, a Compiled out; fills masks
    GrammarMatcher   the position of one output in its grammar
    Grammars         the service: `ask` begins to compile, `take` reports the end; no call waits

Implementations: `llg.py` (llguidance), `xgr.py` (xgrammar) and `tests/grammar/choice.py` (plain
Python) compile; `pool.py` is the service, and the journal's replay repeats its reports. Masks
(`masks.py`) hold the allowed next tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from weft.grammar.masks import LazyBitmaskRow, Words

# Prefix of the error of an output whose grammar is too expensive, or that has left its grammar.
NOT_FOLLOWED = "the grammar cannot be followed"


class InvalidGrammar(ValueError):
    """No output can ever follow this grammar. The message is for the user."""


class Key(NamedTuple):
    """A grammar. Equal keys are compiled once."""

    kind: str  # json_schema, regex, choice, ebnf, structural_tag
    text: str
    strict: bool = False  # refuse the grammar, instead of leaving out what cannot be enforced


class GrammarMatcher(Protocol):
    """A matcher that cannot continue keeps its `error` for ever; it does not raise."""

    @property
    def error(self) -> str: ...

    @property
    def is_complete(self) -> bool:
        """Whether only the end of the output may follow."""
        ...

    def fork(self) -> GrammarMatcher:
        """A copy at the same position."""
        ...

    def consume(self, token: int) -> bool:
        """Consume a token. Returns whether more may follow: the output is not complete, without
        error."""
        ...

    def forced(self) -> list[int]:
        """The tokens of the text that must follow, as the tokenizer would encode it.

        [] if there is a choice. The last tokens are left out if later text might change the
        encoding.
        """
        ...


@dataclass(frozen=True, slots=True)
class Compiled:
    matcher: GrammarMatcher  # at the beginning; callers fork it
    mask: Words  # [W] mask of the first token
    num_bytes: int  # approximate memory
    warnings: tuple[str, ...] = ()  # parts of the grammar that are not enforced


class Compiler(Protocol):
    def compile(self, key: Key) -> Compiled:
        """Compile a grammar. Raises InvalidGrammar."""
        ...

    def fill(self, matchers: Sequence[GrammarMatcher], masks: Words) -> None:
        """Write the allowed next tokens of each matcher into masks [M, W].

        The row of a matcher with an error is undefined.
        """
        ...


@dataclass(slots=True)
class Constraint:
    """The position of one request in its grammar, and the mask of its next token.

    While a thread fills the mask, no other thread may use the matcher.
    """

    matcher: GrammarMatcher
    mask: LazyBitmaskRow


class CompileResult(NamedTuple):
    """The answer to one `ask`: a constraint, or the reason why there is none."""

    id: int
    constraint: Constraint | None
    warnings: tuple[str, ...] = ()
    message: str = ""
    status: int = 200  # an HTTP status: 400 is an error of the grammar
    compile_s: float = 0.0  # 0: it was in the cache


class Advance(NamedTuple):
    """The effect of one token on its grammar. With an error, nothing is forced."""

    is_complete: bool = False  # nothing may follow this token and the forced ones
    # An error that occurs only while the mask is filled is in `LazyBitmasks.faults`.
    error: str = ""
    forced: tuple[int, ...] = ()  # tokens that must follow; the matcher has consumed them, too


CONTINUE = Advance()


class Grammars(Protocol):
    """All methods are called from one thread, and none waits for a compilation."""

    def ask(self, id: int, key: Key, tenant: str = "") -> None:
        """Compile a grammar for request `id` of `tenant`. `take` reports the result."""
        ...

    def cancel(self, id: int) -> None:
        """The request has ended: drop its result."""
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
        """Give each constraint its token, then up to `room` forced tokens.

        A constraint may occur several times, and takes its tokens in this order. The call begins to
        fill the masks of the next tokens. If an earlier mask of a constraint is still being filled,
        the call waits for it first.
        """
        ...

    def follow(
        self, constraint: Constraint, tokens: Sequence[int], *, jumps: bool
    ) -> list[LazyBitmaskRow]:
        """The masks after each of some drafted tokens; the constraint keeps its position.

        The first n tokens have a mask: those that are allowed and leave a choice after them. There
        is no mask where the output would be complete, nor, with `jumps`, where tokens are forced.
        """
        ...


class NoGrammars:
    """Compiles nothing, and refuses every request for a grammar with `reason`."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._asked: list[int] = []

    def prepare(self) -> None:
        """Load what the first grammar will need: nothing."""

    def ask(self, id: int, key: Key, tenant: str = "") -> None:
        self._asked.append(id)

    def cancel(self, id: int) -> None:
        if id in self._asked:
            self._asked.remove(id)

    def close(self) -> None:
        pass

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

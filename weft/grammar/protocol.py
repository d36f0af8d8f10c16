"""Grammars: what compiles them, what follows them, and who is asked for both.

    Compiler   a grammar library for one vocabulary: text in, a Compiled out; fills masks
    GrammarMatcher    the place of one output in its grammar
    Grammars   what the scheduler asks: compiling begins at `ask` and its end is told by `take`, never waited for

Twins: `llg.py` (llguidance) and `choice.py` (plain Python, for tests) compile; `pool.py` is the service, the journal's
replay repeats what it said. What may come next is said in masks (`masks.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from weft.grammar.masks import LazyBitmaskRow, Words

NOT_FOLLOWED = "the grammar cannot be followed"  # so begins the error of an output whose grammar is too hard, or is left


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
        """Go on by a token. Returns whether more may follow: it is not complete, and has no error."""
        ...

    def forced(self) -> list[int]:
        """The tokens in which the text is written that must follow, as the tokenizer would write it; [] if there is a
        choice. The last ones are left out if what comes behind them might change how it is written."""
        ...


@dataclass(frozen=True, slots=True)
class Compiled:
    matcher: GrammarMatcher  # at the beginning: to be forked
    mask: Words  # [W] of the first token
    num_bytes: int  # what keeping it costs, about
    warnings: tuple[str, ...] = ()  # what of the grammar is not enforced


class Compiler(Protocol):
    def compile(self, key: Key) -> Compiled:
        """Raises InvalidGrammar."""
        ...

    def fill(self, matchers: Sequence[GrammarMatcher], masks: Words) -> None:
        """Write into masks [M, W] what may come next. The row of a matcher with an error means nothing."""
        ...


@dataclass(slots=True)
class Constraint:
    """One request's place in its grammar, and what may come next there. Nobody touches the matcher while its mask is
    being filled."""

    matcher: GrammarMatcher
    mask: LazyBitmaskRow


class CompileResult(NamedTuple):
    """What became of one `ask`: a constraint, or the reason why there is none."""

    id: int
    constraint: Constraint | None
    warnings: tuple[str, ...] = ()
    message: str = ""
    status: int = 200  # as an HTTP status: 400 is the grammar's fault
    compile_s: float = 0.0  # 0: it was compiled already


class Advance(NamedTuple):
    """What became of one token. With an error nothing is forced."""

    is_complete: bool = False  # nothing may follow it, and those that are forced
    error: str = (
        ""  # one that is found only when the mask is filled is among its `LazyBitmasks.faults`
    )
    forced: tuple[int, ...] = ()  # tokens that had to follow: the matcher has taken them, too


CONTINUE = Advance()


class Grammars(Protocol):
    """Called from one thread. Compiling is never waited for."""

    def ask(self, id: int, key: Key, tenant: str = "") -> None:
        """Compile a grammar for request `id` of `tenant`. `take` will tell."""
        ...

    def cancel(self, id: int) -> None:
        """The request has ended: its verdict is wanted no more."""
        ...

    def take(self) -> list[CompileResult]:
        """The verdicts that have come since."""
        ...

    def advance(
        self, constraints: Sequence[Constraint], tokens: Sequence[int], room: Sequence[int]
    ) -> list[Advance]:
        """Each takes its token, then up to `room` that must follow. To find out what may come next is begun; where
        that was still under way, it is waited for first."""
        ...


class NoGrammars:
    """Where nothing can be compiled: every request that asks is refused with `reason`."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._asked: list[int] = []

    def ask(self, id: int, key: Key, tenant: str = "") -> None:
        self._asked.append(id)

    def cancel(self, id: int) -> None:
        if id in self._asked:
            self._asked.remove(id)

    def take(self) -> list[CompileResult]:
        asked, self._asked = self._asked, []
        return [CompileResult(id, None, message=self._reason, status=400) for id in asked]

    def advance(
        self, constraints: Sequence[Constraint], tokens: Sequence[int], room: Sequence[int]
    ) -> list[Advance]:
        raise AssertionError("there is no constraint")

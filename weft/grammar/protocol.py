"""Grammars: what compiles them, what follows them, and who is asked for both.

    Compiler   a grammar library for one vocabulary: text in, a Compiled out; fills masks
    Matcher    the place of one output in its grammar
    Grammars   what the scheduler asks: compiling begins at `ask` and its end is told by `take`, never waited for

Twins: `llg.py` (llguidance) and `choice.py` (plain Python, for tests) compile; `pool.py` is the service, the journal's
replay repeats what it said. A mask is a row of packed bits: token t is allowed if bit t % 32 of word t // 32 is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.int32]


class InvalidGrammar(ValueError):
    """No output can be held to this grammar, now or ever. The message is for the user."""


class Key(NamedTuple):
    """A grammar. Equal ones are compiled once."""

    kind: str  # json_schema, regex, choice, ebnf, structural_tag
    text: str
    strict: bool = False  # refuse what cannot be enforced, instead of leaving it out


class Matcher(Protocol):
    """A matcher that cannot go on has an `error`, for ever; it does not raise."""

    @property
    def error(self) -> str: ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow any more but the end of the output."""
        ...

    def fork(self) -> Matcher:
        """Another one at the same place."""
        ...

    def consume(self, token: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Compiled:
    matcher: Matcher  # at the beginning: to be forked
    mask: Words  # [W] of the first token
    num_bytes: int  # what keeping it costs, about
    warnings: tuple[str, ...] = ()  # what of the grammar is not enforced


class Compiler(Protocol):
    def compile(self, key: Key) -> Compiled:
        """Raises InvalidGrammar."""
        ...

    def fill(self, matchers: Sequence[Matcher], masks: Words) -> None:
        """Write into masks [M, W] what may come next. The row of a matcher with an error means nothing."""
        ...


@dataclass(slots=True)
class Constraint:
    """One request's place in its grammar, and what may come next there."""

    matcher: Matcher
    mask: Words  # [W]


class Verdict(NamedTuple):
    """What became of one `ask`: a constraint, or the reason why there is none."""

    id: int
    constraint: Constraint | None
    warnings: tuple[str, ...] = ()
    message: str = ""
    status: int = 200  # as an HTTP status: 400 is the grammar's fault
    compile_s: float = 0.0  # 0: it was compiled already


class Move(NamedTuple):
    """What became of one token."""

    is_complete: bool = False
    error: str = ""


class Grammars(Protocol):
    """Called from one thread, and never waits."""

    def ask(self, id: int, key: Key) -> None:
        """Compile a grammar for request `id`. `take` will tell."""
        ...

    def cancel(self, id: int) -> None:
        """The request has ended: its verdict is wanted no more."""
        ...

    def take(self) -> list[Verdict]:
        """The verdicts that have come since."""
        ...

    def advance(self, constraints: Sequence[Constraint], tokens: Sequence[int]) -> list[Move]:
        """Each takes its token, and learns what may come next."""
        ...


class NoGrammars:
    """Where nothing can be compiled: every request that asks is refused with `reason`."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._asked: list[int] = []

    def ask(self, id: int, key: Key) -> None:
        self._asked.append(id)

    def cancel(self, id: int) -> None:
        if id in self._asked:
            self._asked.remove(id)

    def take(self) -> list[Verdict]:
        asked, self._asked = self._asked, []
        return [Verdict(id, None, message=self._reason, status=400) for id in asked]

    def advance(self, constraints: Sequence[Constraint], tokens: Sequence[int]) -> list[Move]:
        raise AssertionError("there is no constraint")

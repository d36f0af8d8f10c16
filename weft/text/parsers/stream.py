"""A stream of text that arrives in pieces, and the operations by which formats read it.

The reader of a format is a generator that reads from a `Stream` with `yield from`, as if all text
were present; the stream waits for missing text. So a reader is a few lines of code, and all readers
handle pieces alike:

    consumed and emitted | consumed, held back until it is known to be a call | not read yet
                          ^ _taken                                             ^ _position (_buffer)

Each character is read a fixed number of times. `MAX_PENDING` limits the held-back text. A stream
that is not `eager` emits a call when it is complete, so a broken call can become text; it holds
back more (`calls.py`). With `tells_cut`, it also emits a partial call at the end of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Set
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from weft.text.parsers.events import AnswerText, Event

MAX_PENDING = 65_536  # characters of a call that may be held back before it is recognised
MAX_NAME_LEN = 256
_NOT_SPACE = re.compile(r"\S")
_NAME = re.compile(r"[A-Za-z0-9_.\-]*")

T = TypeVar("T")
Schema = Mapping[str, Any]
NO_SCHEMAS: Mapping[str, Schema] = MappingProxyType({})
Reading = Generator[None, None, T]


class Scanner(Protocol):
    """Finds the end of something."""

    @property
    def done(self) -> bool: ...

    @property
    def failed(self) -> bool: ...

    def scan(self, text: str, position: int) -> int:
        """Scan `text` from `position` on. Returns the position after the consumed characters."""
        ...


class Taken(NamedTuple):
    """The text that `take_until` consumed."""

    text: str
    marker: str  # "" if the text ended before a marker


class Stream:
    """The text of one completion."""

    def __init__(
        self,
        names: Set[str] = frozenset(),
        *,
        eager: bool,
        tells_cut: bool = False,
        schemas: Mapping[str, Schema] = NO_SCHEMAS,
    ) -> None:
        """`names`: the tools that can be called; `schemas`: the schemas of their arguments, by
        name."""
        self.names = names
        self.schemas = schemas
        self.num_calls = 0
        self.eager = eager
        self.tells_cut = tells_cut
        self.has_cut = False  # the text ended within the last emitted call
        self._buffer = ""
        self._position = 0
        self._ended = False
        self._taken: list[str] = []
        self._events: list[Event] = []

    # ---- the parser's side

    def add(self, text: str) -> None:
        self._buffer = self._buffer[self._position :] + text
        self._position = 0

    def end(self) -> None:
        self._ended = True

    def events(self) -> list[Event]:
        """The events since the last call."""
        events = self._events
        self._events = []
        return events

    def pass_through(self) -> None:
        """Emit all unread and held-back text as answer text."""
        self.give_up()
        self._tell(AnswerText, self._rest())

    # ---- the format's side

    @property
    def ended(self) -> bool:
        """Whether no more text will come: a reader that fails now fails because the text ends."""
        return self._ended

    def settle(self) -> None:
        """The held-back text is understood and not a part of the answer: drop it."""
        self._taken.clear()

    def give_up(self, keep: str = "") -> None:
        """Emit the held-back text as answer text, except `keep` at its end, which stays pending."""
        taken = "".join(self._taken)
        self._tell(AnswerText, taken.removesuffix(keep))
        self._taken.clear()
        if keep:
            self._taken.append(keep)

    def text_until(self, *markers: str, kind: Callable[[str], Event] = AnswerText) -> Reading[str]:
        """Emit the text before the first of `markers`; consume that marker and return it.

        Returns "" at the end of the text. Held-back text is emitted first, as answer text.
        """
        self.give_up()
        while True:
            match, border = self._search(markers)
            self._tell(kind, self._buffer[self._position : border])
            self._position = border
            if match is not None:
                self._take(match.end())
                return match[0]
            if not (yield from self._more()):
                self._tell(kind, self._rest())  # it was not the beginning of a marker
                return ""

    def take_until(self, *markers: str, limit: int = MAX_PENDING) -> Reading[Taken | None]:
        """Consume the text before the first of `markers`, and that marker.

        Returns None if there are more than `limit` characters before it.
        """
        pieces: list[str] = []
        size = 0
        while True:
            match, border = self._search(markers)
            piece = self._buffer[self._position : border]
            pieces.append(piece)
            size += len(piece)
            self._take(border)
            if size > limit:
                return None
            if match is not None:
                self._take(match.end())
                return Taken("".join(pieces), match[0])
            if not (yield from self._more()):
                rest = self._buffer[self._position :]
                self._take(len(self._buffer))
                return Taken("".join(pieces) + rest, "")

    def skip_space(self) -> Reading[str]:
        """Consume white space. Returns the next character, "" at the end of the text."""
        while True:
            match = _NOT_SPACE.search(self._buffer, self._position)
            if match is not None:
                self._take(match.start())
                return match[0]
            self._take(len(self._buffer))
            if not (yield from self._more()):
                return ""

    def accept(self, literal: str) -> Reading[bool]:
        """Consume `literal` if it comes next, else return False."""
        while True:
            end = self._position + len(literal)
            there = self._buffer[self._position : end]
            if there == literal:
                self._take(end)
                return True
            if not literal.startswith(there) or not (yield from self._more()):
                return False

    def accept_one(self, *literals: str) -> Reading[bool]:
        """Consume the first of `literals` that comes next. False if none does."""
        for literal in literals:
            if (yield from self.accept(literal)):
                return True
        return False

    def read_name(self) -> Reading[str]:
        """Consume and return the characters of a tool's name, at most `MAX_NAME_LEN`."""
        while True:
            limit = self._position + MAX_NAME_LEN
            match = _NAME.match(self._buffer, self._position, limit)
            assert match is not None
            is_complete = match.end() < len(self._buffer)
            if is_complete or not (yield from self._more()):
                self._take(match.end())
                return match[0]

    def read_until(self, marker: str) -> Reading[str | None]:
        """Consume the text up to `marker`, and the marker. Returns the text before it.

        Returns None and consumes nothing if the marker does not come within `MAX_NAME_LEN`
        characters.
        """
        while True:
            limit = self._position + MAX_NAME_LEN + len(marker)
            found = self._buffer.find(marker, self._position, limit)
            if found >= 0:
                text = self._buffer[self._position : found]
                self._take(found + len(marker))
                return text
            if len(self._buffer) >= limit or not (yield from self._more()):
                return None

    def read(self, scanner: Scanner) -> Reading[str | None]:
        """Consume and return the text that `scanner` finds.

        Returns None if the scanner fails, or needs more than `MAX_PENDING` characters.
        """
        pieces: list[str] = []
        size = 0
        while not scanner.done:
            piece = self.step(scanner)
            pieces.append(piece)
            size += len(piece)
            if scanner.failed or size > MAX_PENDING:
                return None
            if not scanner.done and not (yield from self.more()):
                return None
        return "".join(pieces)

    def step(self, scanner: Scanner) -> str:
        """Let `scanner` consume text that is already present. Returns the consumed text."""
        start = self._position
        end = scanner.scan(self._buffer, start)
        self._take(end)
        return self._buffer[start:end]

    def more(self) -> Reading[bool]:
        """Wait for more text if all is consumed. False at the end of the text."""
        if self._position < len(self._buffer):
            return True
        return (yield from self._more())

    def tell(self, event: Event) -> None:
        self._events.append(event)

    # ---- internals

    def _search(self, markers: tuple[str, ...]) -> tuple[re.Match[str] | None, int]:
        """Find the first of `markers` in the unread text. Returns the match, and the end of the
        text before it.

        Without a match, that text excludes a possible beginning of a marker at the buffer's end.
        """
        pattern, longest = _alternation(markers)
        match = pattern.search(self._buffer, self._position)
        if match is not None:
            return match, match.start()
        num_pending = 0
        if not self._ended:
            num_pending = _possible_beginning(self._buffer, markers, longest)
        return None, max(len(self._buffer) - num_pending, self._position)

    def _more(self) -> Reading[bool]:
        """Wait for more text. False at the end of the text."""
        before = len(self._buffer) - self._position
        while not self._ended:
            yield
            if len(self._buffer) - self._position > before:
                return True
        return False

    def _take(self, end: int) -> None:
        if end > self._position:
            self._taken.append(self._buffer[self._position : end])
            self._position = end

    def _rest(self) -> str:
        rest = self._buffer[self._position :]
        self._position = len(self._buffer)
        return rest

    def _tell(self, kind: Callable[[str], Event], text: str) -> None:
        if text:
            self._events.append(kind(text))


@cache
def _alternation(markers: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    pattern = re.compile("|".join(map(re.escape, markers)))
    return pattern, max(map(len, markers))


def _possible_beginning(text: str, markers: tuple[str, ...], longest: int) -> int:
    """The number of characters at the end of `text` that may be the beginning of a marker."""
    for size in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-size:]
        for marker in markers:
            if marker.startswith(tail):
                return size
    return 0

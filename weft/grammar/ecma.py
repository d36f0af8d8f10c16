"""Regular expressions of ECMA-262, in the syntax of the grammar library's engine (Rust's `regex`).

Both the keyword `pattern` and the fields `regex` have this one meaning: `\\d` and `\\w` are ASCII,
`\\s` is ECMA-262's white space, and a class has no operators. `.` is any character but a line feed.
This module knows nothing of schemas.
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple, TypeAlias

from weft.grammar.protocol import InvalidGrammar

_SPACE = (
    r"\t\n\x{b}\x{c}\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
    r"\x{feff}"
)
_SETS = {"d": "0-9", "w": "A-Za-z0-9_", "s": _SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_QUANTIFIER = re.compile(r"\{[0-9]+(?:,[0-9]*)?\}")
_SURROGATES = re.compile(
    r"\\u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})"
)
_CODE = re.compile(r"\\(?:u\{([0-9a-fA-F]+)\}|u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2}))")
_PROPERTY = re.compile(r"\\[pP]\{[^}]*\}")
_LOOKAROUNDS = ("(?=", "(?!", "(?<=", "(?<!")
_GROUP = re.compile(r"\((?:\?:|\?P?<(\w+)>)?")
_REPEATED = re.compile(r"([*+?]|\{[0-9]+(?:,[0-9]*)?\})\??")


class Class(NamedTuple):
    """The characters of a class, of a set as `\\d`, or of a dot."""

    text: str  # the class as the engine reads it
    items: list[int | tuple[int, int] | str]  # characters, ranges, and sets by their text
    is_negated: bool

    def has(self, code: int) -> bool:
        return any(_has(item, code) for item in self.items) != self.is_negated


def from_ecma(pattern: str) -> str:
    """The same expression for the engine. Raises InvalidGrammar for what no automaton can have."""
    return _Reader(pattern).read()


# A character, a class, or an operator: ( ) | * + ? {m,n} ^ $, and `*?` without its question mark.
Piece: TypeAlias = int | Class | str


def pieces(pattern: str, *, dot_takes_all: bool = False) -> list[Piece]:
    """The expression piece by piece, without names of groups.

    Raises InvalidGrammar for what no automaton can have, and for flags inside the pattern.
    """
    return _PieceReader(pattern, dot_takes_all=dot_takes_all).all()


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._found: list[int | tuple[int, int] | str] = []  # of the class being read

    def read(self) -> str:
        written: list[str] = []
        while self._at < len(self._pattern):
            written.append(self._next())
        return "".join(written)

    def _next(self) -> str:
        rest = self._pattern[self._at :]
        first = rest[0]
        if first == "\\":
            return self._escape()
        if first == "[":
            return self._class()
        if rest.startswith(_LOOKAROUNDS):
            raise InvalidGrammar(f"look-around is not supported: {self._pattern!r}")
        if rest.startswith("(?<"):
            self._at += 3
            return "(?P<"
        quantifier = _QUANTIFIER.match(rest)
        if quantifier:
            self._at += quantifier.end()
            return quantifier[0]
        self._at += 1
        if first in "{}]":
            return "\\" + first
        return first

    def _escape(self) -> str:
        """An escape outside a class."""
        letter = self._pattern[self._at + 1 : self._at + 2]
        if letter and letter in "bBk123456789":
            name = "a word boundary" if letter in "bB" else "a back-reference"
            raise InvalidGrammar(f"{name} is not supported: {self._pattern!r}")
        if letter and letter in "Az":  # the ends of the text, as other engines write them
            self._at += 2
            return "\\" + letter
        code = self._atom()
        if isinstance(code, int):
            return _literal(code)
        return f"[{code}]" if not code.startswith(("[", "\\p", "\\P")) else code

    def _class(self) -> str:
        self._at += 1
        self._found = []
        opening = "["
        if self._pattern.startswith("^", self._at):
            self._at += 1
            opening = "[^"
        items: list[str] = []
        while not self._pattern.startswith("]", self._at):
            items.append(self._item())
        self._at += 1
        if items:
            return f"{opening}{''.join(items)}]"
        if opening == "[^":
            return "(?s:.)"
        raise InvalidGrammar(f"an empty class matches nothing: {self._pattern!r}")

    def _item(self) -> str:
        """A character, a range or a set of a class."""
        first = self._atom(in_class=True)
        is_range = self._pattern.startswith("-", self._at)
        is_last = self._pattern.startswith("-]", self._at)
        if not is_range or is_last or isinstance(first, str):
            self._found.append(first)
            return first if isinstance(first, str) else _literal(first)
        self._at += 1
        last = self._atom(in_class=True)
        if isinstance(last, str):
            self._found += [first, ord("-"), last]
            return f"{_literal(first)}{_literal(ord('-'))}{last}"
        self._found.append((first, last))
        return f"{_literal(first)}-{_literal(last)}"

    def _atom(self, *, in_class: bool = False) -> int | str:
        """The code of the next character, or the members of a set."""
        if self._at >= len(self._pattern):
            raise InvalidGrammar(f"a class has no end: {self._pattern!r}")
        first = self._pattern[self._at]
        if first != "\\":
            self._at += 1
            return ord(first)
        pair = _SURROGATES.match(self._pattern, self._at)
        if pair:
            self._at = pair.end()
            high = int(pair["high"], 16) - 0xD800
            return 0x10000 + (high << 10) + int(pair["low"], 16) - 0xDC00
        code = _CODE.match(self._pattern, self._at)
        if code:
            self._at = code.end()
            return self._scalar(int(code[1] or code[2] or code[3], 16))
        property = _PROPERTY.match(self._pattern, self._at)
        if property:
            self._at = property.end()
            return property[0]
        return self._letter(in_class)

    def _letter(self, in_class: bool) -> int | str:
        letter = self._pattern[self._at + 1 : self._at + 2]
        if not letter:
            raise InvalidGrammar(f"the pattern ends with a backslash: {self._pattern!r}")
        self._at += 2
        if letter in _SETS:
            return _SETS[letter]
        if letter.lower() in _SETS:
            return f"[^{_SETS[letter.lower()]}]"
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter == "b" and in_class:
            return 8
        control = self._pattern[self._at : self._at + 1]
        if letter == "c" and control.isascii() and control.isalpha():
            self._at += 1
            return ord(control) % 32
        return ord(letter)

    def _scalar(self, code: int) -> int:
        if 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
            raise InvalidGrammar(f"U+{code:X} is not a character: {self._pattern!r}")
        return code


class _PieceReader(_Reader):
    def __init__(self, pattern: str, *, dot_takes_all: bool) -> None:
        super().__init__(pattern)
        self._dot = Class(r"[^\n]", [ord("\n")], True)
        if dot_takes_all:
            self._dot = Class("(?s:.)", [], True)

    def all(self) -> list[Piece]:
        found: list[Piece] = []
        while self._at < len(self._pattern):
            found.append(self._piece())
        return found

    def _piece(self) -> Piece:
        first = self._pattern[self._at]
        if first == "[":
            text = self._class()
            return Class(text, self._found, text.startswith(("[^", "(?s")))
        if first == "\\":
            return self._escaped()
        quantifier = _REPEATED.match(self._pattern, self._at)
        if quantifier:
            self._at = quantifier.end()
            return quantifier[1]
        if first == "(":
            return self._group()
        self._at += 1
        if first in "|)^$":
            return first
        return self._dot if first == "." else ord(first)

    def _escaped(self) -> Piece:
        before = self._at
        text = self._escape()  # refuses what no automaton can have
        if text in ("\\A", "\\z"):
            return "^" if text == "\\A" else "$"
        self._at = before
        found = self._atom()
        return found if isinstance(found, int) else Class(text, [found], False)

    def _group(self) -> str:
        if self._pattern.startswith(_LOOKAROUNDS, self._at):
            raise InvalidGrammar(f"look-around is not supported: {self._pattern!r}")
        group = _GROUP.match(self._pattern, self._at)
        assert group is not None, "the text begins with a bracket"
        self._at = group.end()
        if group[0] == "(" and self._pattern.startswith("?", self._at):
            raise InvalidGrammar(f"flags in a pattern are not supported here: {self._pattern!r}")
        return "("


def _has(item: int | tuple[int, int] | str, code: int) -> bool:
    """Whether an item of a class has a character, which is ASCII."""
    if isinstance(item, int):
        return item == code
    if isinstance(item, tuple):
        return item[0] <= code <= item[1]
    if item.startswith(("\\p", "\\P")):
        name = item[3:-1]
        is_category = len(name) <= 2 and unicodedata.category(chr(code)).startswith(name)
        return is_category != item.startswith("\\P")
    is_negated = item.startswith("[^")
    text = item[2:-1] if is_negated else item
    letter = next(letter for letter, members in _SETS.items() if members == text)
    return (re.match(f"\\{letter}", chr(code), re.ASCII) is not None) != is_negated


def _literal(code: int) -> str:
    if chr(code).isascii() and chr(code).isalnum():
        return chr(code)
    return f"\\x{{{code:x}}}"

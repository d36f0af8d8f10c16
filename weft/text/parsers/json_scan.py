"""Scans one JSON object that arrives in pieces: finds its end, or an error.

It checks the whole grammar of JSON, keeps only the open brackets, and reads each character once.
Knows no tool calls.
"""

from __future__ import annotations

import re
from enum import IntEnum

MAX_DEPTH = 128  # nested brackets; deeper objects are refused
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # ordinary characters of a string
_WORD = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORD_CHARS = frozenset("+-.0123456789Eaeflnrstu")
_SPACE = frozenset(" \t\n\r")
_MAX_WORD_LEN = 64


class _State(IntEnum):
    START = 0
    VALUE = 1
    FIRST_VALUE = 2
    KEY = 3
    FIRST_KEY = 4
    COLON = 5
    AFTER = 6
    STRING = 7
    ESCAPE = 8
    HEX = 9
    WORD = 10
    OVER = 11


class JsonScanner:
    """Scans one object.

    `scan` stops after a key of the outermost object (with its colon), after its value, and after
    the object itself: `event` is then "key", "value" or "done". At a wrong character, which is not
    consumed, `event` is "failed".
    """

    def __init__(self) -> None:
        self.event = ""
        self._state = _State.START
        self._open: list[str] = []
        self._is_key = False
        self._word = ""
        self._num_hex = 0

    @property
    def done(self) -> bool:
        return self.event == "done"

    @property
    def failed(self) -> bool:
        return self.event == "failed"

    def scan(self, text: str, position: int) -> int:
        """Scan `text` from `position` to the next event or to its end.

        Returns the position after the last consumed character.
        """
        self.event = ""
        while position < len(text):
            if self._state is _State.STRING:
                match = _PLAIN.match(text, position)
                assert match is not None
                if match.end() > position:
                    position = match.end()
                    continue
            if self._state is _State.WORD and text[position] not in _WORD_CHARS:
                # The first character after a word ends it, and is then read again.
                self._end_word()
            else:
                self._step(text[position])
                position += not self.failed
            if self.event:
                return position
        return position

    def _step(self, char: str) -> None:
        match self._state:
            case _State.STRING:
                self._in_string(char)
            case _State.ESCAPE:
                self._num_hex = 4 if char == "u" else 0
                self._go(char in '"\\/bfnrtu', self._in_hex_or_string())
            case _State.HEX:
                self._num_hex -= 1
                self._go(char in "0123456789abcdefABCDEF", self._in_hex_or_string())
            case _State.WORD:
                self._word += char
                self._go(len(self._word) <= _MAX_WORD_LEN, _State.WORD)
            case _ if char in _SPACE:
                pass
            case _State.START:
                self._go(char == "{", _State.FIRST_KEY)
                self._open.append(char)
            case _State.COLON:
                self._go(char == ":", _State.VALUE)
                if len(self._open) == 1 and not self.event:
                    self.event = "key"
            case _State.AFTER:
                self._after_value(char)
            case _State.KEY | _State.FIRST_KEY:
                self._key(char)
            case _State.VALUE | _State.FIRST_VALUE:
                self._value(char)

    def _in_hex_or_string(self) -> _State:
        return _State.HEX if self._num_hex else _State.STRING

    def _go(self, right: bool, state: _State) -> None:
        if right:
            self._state = state
        else:
            self.event = "failed"
            self._state = _State.OVER

    def _in_string(self, char: str) -> None:
        if char == "\\":
            self._state = _State.ESCAPE
        elif char == '"' and self._is_key:
            self._state = _State.COLON
        elif char == '"':
            self._end_value()
        else:
            self._go(False, _State.OVER)  # a control character

    def _key(self, char: str) -> None:
        if char == "}" and self._state is _State.FIRST_KEY:
            self._close(char)
            return
        self._is_key = True
        self._go(char == '"', _State.STRING)

    def _value(self, char: str) -> None:
        if char == "]" and self._state is _State.FIRST_VALUE:
            self._close(char)
        elif char in "{[":
            self._open.append(char)
            state = _State.FIRST_KEY if char == "{" else _State.FIRST_VALUE
            self._go(len(self._open) <= MAX_DEPTH, state)
        elif char == '"':
            self._is_key = False
            self._state = _State.STRING
        else:
            self._word = char
            self._go(char in "-0123456789tfn", _State.WORD)

    def _after_value(self, char: str) -> None:
        if char == ",":
            self._state = _State.KEY if self._open[-1] == "{" else _State.VALUE
        else:
            self._close(char)

    def _close(self, char: str) -> None:
        if char != {"{": "}", "[": "]"}[self._open[-1]]:
            self._go(False, _State.OVER)
            return
        self._open.pop()
        if self._open:
            self._end_value()
        else:
            self.event = "done"
            self._state = _State.OVER

    def _end_word(self) -> None:
        if _WORD.fullmatch(self._word):
            self._end_value()
        else:
            self._go(False, _State.OVER)

    def _end_value(self) -> None:
        self._state = _State.AFTER
        if len(self._open) == 1:
            self.event = "value"

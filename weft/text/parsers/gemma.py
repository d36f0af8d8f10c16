"""Calls in the notation of FunctionGemma and Gemma 4, with special tokens as quotes of strings.

    <start_function_call>call:weather{city:<escape>Oslo<escape>,days:[1,2]}<end_function_call>
    <|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:[1,2]}<tool_call|>

A call is emitted when it is complete. It is translated to JSON token by token; a value without
quotes is a number or a word of JSON, or a text that the model forgot to quote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from weft.text.parsers.calls import MAX_CALL_LEN, complete_call
from weft.text.parsers.stream import Reading, Stream
from weft.text.parsers.typed_values import ArgumentTypes

MAX_DEPTH = 128
_BARE = re.compile(r"[^{}\[\],]*")
_KEY = re.compile(r"[^{}\[\],:<>]{1,256}")
_CLOSING = {"{": "}", "[": "]"}


class GemmaMarks(NamedTuple):
    begin: str
    end: str
    quote: str


FUNCTION_GEMMA = GemmaMarks("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4 = GemmaMarks("<|tool_call>", "<tool_call|>", '<|"|>')


def gemma(stream: Stream, marks: GemmaMarks) -> Reading[None]:
    while (yield from stream.text_until(marks.begin)):
        yield from stream.skip_space()
        if not (yield from stream.accept("call:")):
            continue
        name = yield from stream.read_name()
        if name not in stream.names:
            continue
        body = yield from stream.take_until(marks.end, limit=MAX_CALL_LEN)
        if body is None:
            continue
        types = ArgumentTypes(stream.schemas.get(name))
        arguments = translated_object(body.text.strip(), marks.quote, types.as_json)
        if arguments is not None and complete_call(stream, name, arguments):
            yield from stream.skip_space()
            stream.settle()


def translated_object(
    source: str,
    quote: str,
    as_json: Callable[[str, str], str],
) -> str | None:
    """An object in this notation, translated to JSON; None if `source` is not one.

    `as_json` translates a value without quotes. Its first argument is the value's key, if the value
    is directly in the outermost object, else "".
    """
    if not source.startswith("{"):
        return None
    writer = _ObjectWriter(quote, as_json)
    position = 0
    while position < len(source):
        if writer.is_done:
            return None  # there is text after the object
        end = writer.step(source, position)
        if end is None:
            return None
        position = end
    if not writer.is_done:
        return None
    return "".join(writer.pieces)


class _ObjectWriter:
    """Writes JSON token by token."""

    def __init__(self, quote: str, as_json: Callable[[str, str], str]) -> None:
        self.pieces: list[str] = []
        self._quote = quote
        self._as_json = as_json
        self._open: list[str] = []  # the closing brackets that are still missing
        self._key = ""  # the current key of the outermost object
        self._awaits = "value"  # the next token: "value", "key" or "comma" (or closing bracket)
        self._is_first = False  # the innermost bracket is still empty

    @property
    def is_done(self) -> bool:
        return bool(self.pieces) and not self._open

    def step(self, source: str, position: int) -> int | None:
        """Read a token at `position`. Returns the position after it; None if it is wrong."""
        char = source[position]
        if char.isspace():
            return position + 1
        if self._open and char == self._open[-1] and (self._is_first or self._awaits == "comma"):
            self.pieces.append(self._open.pop())
            self._after_value()
            return position + 1
        if self._awaits == "comma":
            return self._comma(char, position)
        if self._awaits == "key":
            return self._read_key(source, position)
        if char in _CLOSING:
            return self._bracket(char, position)
        return self._read_value(source, position)

    def _comma(self, char: str, position: int) -> int | None:
        if char != ",":
            return None
        self.pieces.append(", ")
        self._awaits = "value"
        if self._open[-1] == "}":
            self._awaits = "key"
        return position + 1

    def _bracket(self, char: str, position: int) -> int | None:
        self.pieces.append(char)
        self._open.append(_CLOSING[char])
        if len(self._open) > MAX_DEPTH:
            return None
        self._is_first = True
        self._awaits = "value"
        if char == "{":
            self._awaits = "key"
        return position + 1

    def _read_key(self, source: str, position: int) -> int | None:
        if source.startswith(self._quote, position):
            begin = position + len(self._quote)
            end = source.find(self._quote, begin)
            key = source[begin:end]
            colon = end + len(self._quote)
        else:
            match = _KEY.match(source, position)
            if match is None:
                return None
            key = match[0].strip()
            colon = end = match.end()
        if end < 0 or source[colon : colon + 1] != ":":
            return None
        if len(self._open) == 1:
            self._key = key
        self.pieces.append(json.dumps(key, ensure_ascii=False) + ": ")
        self._awaits = "value"
        self._is_first = False
        return colon + 1

    def _read_value(self, source: str, position: int) -> int | None:
        if source.startswith(self._quote, position):
            begin = position + len(self._quote)
            end = source.find(self._quote, begin)
            if end < 0:
                return None
            self.pieces.append(json.dumps(source[begin:end], ensure_ascii=False))
            self._after_value()
            return end + len(self._quote)
        match = _BARE.match(source, position)
        if match is None or not match[0]:
            return None
        key = ""
        if len(self._open) == 1:
            key = self._key
        self.pieces.append(self._as_json(key, match[0].strip()))
        self._after_value()
        return match.end()

    def _after_value(self) -> None:
        self._awaits = "comma"
        self._is_first = False

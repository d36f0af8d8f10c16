"""Tool calls as a list of Python calls: Llama 3.2, Llama 4, ToolACE, and LFM2 (between its own
marks); Olmo 3 writes one call per line.

    [weather(city="Oslo", days=3), news()]

A list is emitted when it is complete: a list with anything else in it is text.

Arguments are keyword arguments with literals. They are translated to JSON token by token, and never
given to Python's own parser, because nested text can exhaust its stack.
"""

from __future__ import annotations

import ast
import json
import re

from weft.text.parsers.calls import MAX_CALL_LEN, complete_call, is_object
from weft.text.parsers.stream import Reading, Stream
from weft.text.surrogates import well_formed

MAX_DEPTH = 128
LFM2_BEGIN = "<|tool_call_start|>"
OLMO3_BEGIN = "<function_calls>"
_NAME = re.compile(r"[A-Za-z_][\w.\-]*", re.ASCII)
_NAME_CHARS = re.compile(r"[\w.\-\s]*", re.ASCII)
_PLAIN = re.compile(r"[^\"'\\()\[\]{}]*")
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\\n]|\\[\s\S])*"|'(?:[^'\\\n]|\\[\s\S])*')"""
    r"""|(?P<number>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)(?![\w.])"""
    r"""|(?P<word>[A-Za-z_]\w*)|(?P<mark>[\[\](){}:,=]))\s*""",
    re.ASCII,
)
_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def pythonic(stream: Stream) -> Reading[None]:
    while (yield from stream.text_until("[")):
        calls = yield from _list(stream)
        for name, arguments in calls:
            complete_call(stream, name, arguments)
        if calls:
            yield from stream.skip_space()
            stream.settle()


def lfm2(stream: Stream) -> Reading[None]:
    """A list of calls between special tokens: LFM2.

    <|tool_call_start|>[weather(city="Oslo")]<|tool_call_end|>
    """
    while (yield from stream.text_until(LFM2_BEGIN)):
        yield from stream.skip_space()
        if not (yield from stream.accept("[")):
            continue
        calls = yield from _list(stream)
        for name, arguments in calls:
            complete_call(stream, name, arguments)
        if calls:
            yield from stream.skip_space()
            yield from stream.accept("<|tool_call_end|>")
            yield from stream.skip_space()
            stream.settle()


def olmo3(stream: Stream) -> Reading[None]:
    """One call per line, between tags: Olmo 3.

    <function_calls>
    weather(city="Oslo")
    news()
    </function_calls>
    """
    while (yield from stream.text_until(OLMO3_BEGIN)):
        calls = yield from _lines(stream, "</function_calls>")
        for name, arguments in calls:
            complete_call(stream, name, arguments)
        if calls:
            yield from stream.skip_space()
            stream.settle()


def _lines(stream: Stream, end: str) -> Reading[list[tuple[str, str]]]:
    """Read calls up to `end`, or to the end of the text. Returns their names and arguments.

    Empty if there is anything else.
    """
    calls: list[tuple[str, str]] = []
    size = 0
    while size <= MAX_CALL_LEN:
        is_over = (yield from stream.skip_space()) == ""
        if is_over or (yield from stream.accept(end)):
            return calls
        found = yield from _call(stream)
        if found is None:
            return []
        calls.append(found)
        size += len(found[1])
    return []


def _list(stream: Stream) -> Reading[list[tuple[str, str]]]:
    """Read the calls after an opening bracket, up to the closing bracket or the end of the text.

    Returns their names and arguments; empty if there is anything else.
    """
    calls: list[tuple[str, str]] = []
    size = 0
    while size <= MAX_CALL_LEN:
        yield from stream.skip_space()
        call = yield from _call(stream)
        if call is None:
            return []
        size += len(call[1])
        calls.append(call)
        if (yield from stream.skip_space()) == "" or (yield from stream.accept("]")):
            return calls
        if not (yield from stream.accept(",")):
            return []
    return []


def _call(stream: Stream) -> Reading[tuple[str, str] | None]:
    """Read the next call. Returns its name and arguments; None if there is no call."""
    source = (yield from stream.read(CallScanner())) or ""
    call = translated(source)
    if call is None or call[0] not in stream.names or not is_object(call[1]):
        return None
    return call


class CallScanner:
    """Finds the closing bracket of `name(...)`."""

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._open: list[str] = []  # the closing brackets that are still missing
        self._quote = ""
        self._escaped = False

    def scan(self, text: str, position: int) -> int:
        while position < len(text) and not (self.done or self.failed):
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            skipped = _PLAIN if self._open else _NAME_CHARS
            match = skipped.match(text, position)
            assert match is not None
            position = match.end()
            if position < len(text):
                self._step(text[position])
                position += not self.failed
        return position

    def _step(self, char: str) -> None:
        if not self._open:
            self._open.append(")")
            self.failed = char != "("
        elif self._quote:
            self._escaped = char == "\\"
            if char == self._quote:
                self._quote = ""
        elif char in "\"'":
            self._quote = char
        elif char in _CLOSING:
            self._open.append(_CLOSING[char])
            self.failed = len(self._open) > MAX_DEPTH
        elif char != self._open.pop():  # a wrong bracket, or a backslash
            self.failed = True
        elif not self._open:
            self.done = True


def translated(source: str) -> tuple[str, str] | None:
    """The name and the arguments of a Python call, translated to JSON; None if `source` is not one.

    The check is not complete: if `source` is not a call, the arguments may be invalid JSON.
    """
    name = _NAME.match(source)
    if name is None or not source[name.end() :].lstrip().startswith("("):
        return None
    position = source.index("(", name.end()) + 1
    writer = _Writer()
    while position < len(source):
        token = _TOKEN.match(source, position)
        if token is None:
            return None
        kind = str(token.lastgroup)
        if not writer.add(kind, token[kind]):
            return None
        position = token.end()
    return name[0], "".join(writer.pieces)


class _Writer:
    """Writes JSON from the tokens after the opening bracket of a call."""

    def __init__(self) -> None:
        self.pieces = ["{"]
        self._open = ["}"]  # the JSON closing brackets that are still missing
        self._key = ""  # a keyword whose "=" comes next

    def add(self, kind: str, token: str) -> bool:
        """Add a token. False if it cannot be a part of arguments."""
        if self._key:
            self.pieces.append(json.dumps(self._key) + ": ")
            self._key = ""
            return token == "="
        if not self._open:
            return False
        if kind == "string":
            return self._string(token)
        if kind == "word" and len(self._open) == 1 and self.pieces[-1] in ("{", ", "):
            self._key = token
            return True
        if kind == "word":
            self.pieces.append(_WORDS.get(token, ""))
            return token in _WORDS
        if kind == "number":
            self.pieces.append(token)
            return True
        return self._mark(token)

    def _string(self, token: str) -> bool:
        try:
            value = ast.literal_eval(token)  # one string, nothing nested
        except (ValueError, SyntaxError):
            return False
        self.pieces.append(json.dumps(well_formed(value), ensure_ascii=False))
        return True

    def _mark(self, token: str) -> bool:
        if token == "{":
            self.pieces.append("{")
            self._open.append("}")
        elif token in "([":  # a tuple becomes an array, too
            self.pieces.append("[")
            self._open.append("]")
        elif token in ")]}":
            if self.pieces[-1] == ", ":  # Python allows a trailing comma
                self.pieces.pop()
            self.pieces.append(self._open.pop())
        elif token == ",":
            self.pieces.append(", ")
        else:
            self.pieces.append(": ")
        return token != "="

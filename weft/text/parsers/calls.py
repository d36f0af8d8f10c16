"""Calls in JSON, and calls between marks, read from a `Stream`: what formats have in common.

Which marks stand around a call is the formats' own business (`readers.py`, `xml_calls.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from weft.text.parsers.events import CallArguments, CallBegin
from weft.text.parsers.json_scan import JsonScanner
from weft.text.parsers.stream import MAX_HELD, Reading, Stream

MAX_CALL_LEN = 1_000_000  # characters of a call that is told when it is complete
_ARGUMENT_KEYS = frozenset(["arguments", "parameters"])
_NAME_KEYS = frozenset(["name", "tool_name"])
_OTHER_KEYS = frozenset(["id", "type", "tool_call_id"])  # of a call; without meaning here


def json_call(stream: Stream) -> Reading[bool]:
    """A call as `{"name": ..., "arguments": {...}}`. False if it is none, or breaks off."""
    reader = _CallReader(stream)
    size = 0
    while not reader.done:
        size += len(stream.step(reader))
        # A call that has begun was told: it need not be kept to be given back as text.
        if reader.begun and stream.eager:
            stream.settle()
            size = 0
        if reader.failed or size > _max_len(stream):
            return False
        if not reader.done and not (yield from stream.more()):
            return reader.break_off()
    if not reader.finish():
        return False
    stream.settle()
    return True


def json_arguments(stream: Stream, name: str) -> Reading[bool]:
    """The arguments of a call of `name`, as a JSON object. False if they are none, or break off."""
    if (yield from stream.skip_space()) != "{" or name not in stream.names:
        return False
    call = StreamedCall(stream, name)
    scanner = JsonScanner()
    size = 0
    while not scanner.done:
        piece = stream.step(scanner)
        call.add(piece)
        if stream.eager:
            stream.settle()
        else:
            size += len(piece)
        if scanner.failed or size > _max_len(stream):
            return False
        if not scanner.done and not (yield from stream.more()):
            return call.break_off()
    if not call.close():
        return False
    stream.settle()
    return True


def keyed_call(stream: Stream) -> Reading[bool]:
    """A call as `{"f": {...}}`: its name is the key of its arguments. False if it is none."""
    if not (yield from stream.accept("{")):
        return False
    yield from stream.skip_space()
    if not (yield from stream.accept('"')):
        return False
    name = yield from stream.read_until('"')
    yield from stream.skip_space()
    if name is None or not (yield from stream.accept(":")):
        return False
    if not (yield from json_arguments(stream, name)):
        return False
    yield from stream.skip_space()
    yield from stream.accept("}")
    return True


def json_array(
    stream: Stream,
    read_call: Callable[[Stream], Reading[bool]] = json_call,
) -> Reading[bool]:
    """Calls in `[` and `]`, with commas between them."""
    if not (yield from stream.accept("[")):
        return False
    while True:
        yield from stream.skip_space()
        if not (yield from read_call(stream)):
            return False
        yield from stream.skip_space()
        if not (yield from stream.accept(",")):
            yield from stream.accept("]")
            return True


def section(
    stream: Stream,
    read_call: Callable[[Stream], Reading[bool]],
    *,
    begins: tuple[str, ...],
    call_begin: str = "",
    ends: tuple[str, ...],
) -> Reading[None]:
    """Text, and in it calls one behind the other between one of `begins` and one of `ends`.

    Each call stands behind `call_begin`, where there is one; then it may stand alone, too.
    """
    markers = begins
    if call_begin:
        markers = (*begins, call_begin)
    while True:
        marker = yield from stream.text_until(*markers)
        if not marker:
            return
        if marker != call_begin:
            yield from stream.skip_space()
            if not (yield from stream.accept(call_begin)):
                continue
        # What was consumed without being settled is given back by `text_until`.
        while (yield from read_call(stream)):
            yield from stream.skip_space()
            stream.settle()
            if (yield from stream.accept_one(*ends)):
                yield from stream.skip_space()
                stream.settle()
                break
            if not (yield from stream.accept(call_begin)):
                break


def whole_call(stream: Stream, name: str, arguments: str) -> bool:
    """A call that is known at once. False if `arguments` are no JSON object that can be read."""
    if not is_object(arguments):
        return False
    call = StreamedCall(stream, name)
    call.add(arguments)
    stream.settle()
    return call.close()


def is_object(text: str) -> bool:
    """Whether it is a JSON object that can be read."""
    return isinstance(decoded(text), dict)


def escaped(text: str) -> str:
    """A piece of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def decoded(text: str) -> Any:
    """The value of a JSON text; None if it has none."""
    # Not at the top: the help of the command line names the formats, and needs no decoder.
    import msgspec

    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _max_len(stream: Stream) -> int:
    """Characters of a call that may be kept."""
    return MAX_HELD if stream.eager else MAX_CALL_LEN


class StreamedCall:
    """A call whose name is known. An eager stream tells it at once, another when it is complete."""

    def __init__(self, stream: Stream, name: str) -> None:
        self._stream = stream
        self._name = name
        self._pieces: list[str] = []
        if stream.eager:
            self._begin()

    def add(self, arguments: str) -> None:
        if not self._stream.eager:
            self._pieces.append(arguments)
        elif arguments:
            self._stream.tell(CallArguments(self._index, arguments))

    def as_arguments(self, text: str) -> CallArguments:
        """A piece of a string in the arguments of a call that is told as it comes."""
        return CallArguments(self._index, escaped(text))

    def close(self) -> bool:
        """The call has ended. False if it cannot be told after all.

        Not all that JSON allows can be read, such as half a surrogate pair.
        """
        if self._stream.eager:
            return True
        arguments = "".join(self._pieces)
        if decoded(arguments) is None:
            return False
        self._begin()
        self._stream.tell(CallArguments(self._index, arguments))
        return True

    def break_off(self) -> bool:
        """The text has ended within the call. Whether it is told, as far as it has come."""
        stream = self._stream
        stream.has_cut = stream.eager or stream.tells_cut
        if stream.tells_cut and not stream.eager:
            self._begin()
            stream.tell(CallArguments(self._index, "".join(self._pieces)))
        if stream.tells_cut:
            stream.settle()
        return stream.tells_cut

    def _begin(self) -> None:
        self._index = self._stream.num_calls
        self._stream.num_calls += 1
        self._stream.tell(CallBegin(self._index, self._name))


class _CallReader:
    """Takes name and arguments out of the object that a call is written as."""

    def __init__(self, stream: Stream) -> None:
        self.failed = False
        self._stream = stream
        self._scanner = JsonScanner()
        self._key = ""  # whose value is read; "" before a key
        self._pieces: list[str] = []  # of that key or value
        self._name: str | None = None
        self._arguments: str | None = None  # known before the name
        self._call: StreamedCall | None = None

    @property
    def done(self) -> bool:
        return self._scanner.done

    @property
    def begun(self) -> bool:
        return self._call is not None

    def scan(self, text: str, position: int) -> int:
        end = self._scanner.scan(text, position)
        piece = text[position:end]
        if self._call is not None and self._key in _ARGUMENT_KEYS:
            self._call.add(piece)
        else:
            self._pieces.append(piece)
        match self._scanner.event:
            case "key":
                self._begin_value()
            case "value":
                self._end_value()
            case "failed":
                self.failed = True
        self._maybe_stream()
        return end

    def finish(self) -> bool:
        """The object has ended. Whether it was a call."""
        if self._call is not None:
            return self._call.close()
        return self._name is not None and whole_call(
            self._stream,
            self._name,
            self._arguments or "{}",
        )

    def break_off(self) -> bool:
        """The text has ended within the object. Whether a call is told of it."""
        if self._call is None and self._name is not None and self._stream.tells_cut:
            self._call = StreamedCall(self._stream, self._name)
        return self._call is not None and self._call.break_off()

    def _begin_value(self) -> None:
        key = "".join(self._pieces).strip(" \t\r\n{,:").strip('" \t\r\n')
        is_argument = key in _ARGUMENT_KEYS
        if is_argument and (self._call is not None or self._arguments is not None):
            self.failed = True  # arguments twice
        if not is_argument and key not in _NAME_KEYS and key not in _OTHER_KEYS:
            self.failed = True
        self._key = key
        self._pieces = []

    def _maybe_stream(self) -> None:
        """Arguments whose name is known are passed on as they come, if they are an object."""
        if self.failed or self._name is None or self._call is not None:
            return
        if self._key in _ARGUMENT_KEYS:
            value = "".join(self._pieces).lstrip()
            if value.startswith("{"):
                self._call = StreamedCall(self._stream, self._name)
                self._call.add(value)

    def _end_value(self) -> None:
        key = self._key
        self._key = ""
        if self._call is not None and key in _ARGUMENT_KEYS:
            return
        value = "".join(self._pieces)
        self._pieces = []
        if key in _NAME_KEYS:
            name = decoded(value)
            self._name = name if isinstance(name, str) else None
            self.failed = self._name not in self._stream.names
        elif key in _ARGUMENT_KEYS:
            self._arguments = _as_object(value.strip())
            self.failed = self._arguments is None


def _as_object(value: str) -> str | None:
    """Arguments as a JSON object: as they are, or out of a string, or {} for null."""
    if value.startswith("{"):
        return value
    if value == "null":
        return "{}"
    inner = decoded(value)
    if isinstance(inner, str):
        return inner  # `whole_call` looks into it
    return None

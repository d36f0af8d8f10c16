"""Parts that formats have in common: reading tool calls in JSON, and calls between marks, from a
`Stream`.

The formats themselves define the marks around a call (`readers.py`, `xml_calls.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from weft.text.parsers.events import CallArguments, CallBegin
from weft.text.parsers.json_scan import JsonScanner
from weft.text.parsers.stream import MAX_PENDING, Reading, Stream
from weft.text.surrogates import EscapeMender, readable_json

MAX_CALL_LEN = 1_000_000  # characters of a call whose events are emitted when it is complete
_ARGUMENT_KEYS = frozenset(["arguments", "parameters"])
_NAME_KEYS = frozenset(["name", "tool_name"])
_OTHER_KEYS = frozenset(["id", "type", "tool_call_id"])  # keys of a call that are ignored


def json_call(stream: Stream) -> Reading[bool]:
    """Read a call of the form `{"name": ..., "arguments": {...}}`.

    False if the text is not a call, or ends within it.
    """
    reader = _CallReader(stream)
    size = 0
    while not reader.done:
        size += len(stream.step(reader))
        # The begin of the call was emitted: its text cannot become answer text any more.
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
    """Read the arguments of a call of `name`, a JSON object.

    False if the text is not such an object, or ends within it.
    """
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
    """Read a call of the form `{"f": {...}}`: its name is the key of its arguments.

    False if the text is not such a call.
    """
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
    """Read calls between `[` and `]`, separated by commas. False if the text is something else."""
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
    """Read text with sections: consecutive calls between one of `begins` and one of `ends`.

    With a `call_begin`, each call follows that mark; a call may then also stand outside of a
    section.
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
        # `text_until` emits text that was consumed and not settled as answer text.
        while (yield from read_call(stream)):
            yield from stream.skip_space()
            stream.settle()
            if (yield from stream.accept_one(*ends)):
                yield from stream.skip_space()
                stream.settle()
                break
            if not (yield from stream.accept(call_begin)):
                break


def complete_call(stream: Stream, name: str, arguments: str) -> bool:
    """Emit a complete call. False if `arguments` are not a readable JSON object."""
    if not is_object(arguments):
        return False
    call = StreamedCall(stream, name)
    call.add(arguments)
    stream.settle()
    return call.close()


def is_object(text: str) -> bool:
    """Whether the text is a readable JSON object."""
    return isinstance(decoded(text), dict)


def escaped(text: str) -> str:
    """The text, escaped as a part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def decoded(text: str) -> Any:
    """The value of a JSON text; None if it is not valid. Half surrogate pairs become U+FFFD."""
    # Imported here: the help of the command line names the formats, and needs no decoder.
    import msgspec

    try:
        return msgspec.json.decode(readable_json(text))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _max_len(stream: Stream) -> int:
    """The most characters of a call that may be held back."""
    return MAX_PENDING if stream.eager else MAX_CALL_LEN


class StreamedCall:
    """A call whose name is known. On an eager stream its events are emitted at once, else when the
    call is complete. Half surrogate pairs in its arguments become U+FFFD, so that clients can read
    them and send them back."""

    def __init__(self, stream: Stream, name: str) -> None:
        self._stream = stream
        self._name = name
        self._pieces: list[str] = []
        self._mender = EscapeMender()
        if stream.eager:
            self._begin()

    def add(self, arguments: str) -> None:
        self._tell(self._mender.push(arguments))

    def as_arguments(self, text: str) -> CallArguments:
        """The event for a piece of a string in the arguments. For eager streams."""
        return CallArguments(self._index, escaped(text))

    def close(self) -> bool:
        """The call is complete. False if its arguments cannot be read."""
        self._tell(self._mender.flush())
        if self._stream.eager:
            return True
        arguments = "".join(self._pieces)
        if decoded(arguments) is None:
            return False
        self._begin()
        self._stream.tell(CallArguments(self._index, arguments))
        return True

    def break_off(self) -> bool:
        """The text has ended within the call. Returns whether the partial call is emitted."""
        stream = self._stream
        stream.has_cut = stream.eager or stream.tells_cut
        self._tell(self._mender.flush())
        if stream.tells_cut and not stream.eager:
            self._begin()
            stream.tell(CallArguments(self._index, "".join(self._pieces)))
        if stream.tells_cut:
            stream.settle()
        return stream.tells_cut

    def _tell(self, arguments: str) -> None:
        if not self._stream.eager:
            self._pieces.append(arguments)
        elif arguments:
            self._stream.tell(CallArguments(self._index, arguments))

    def _begin(self) -> None:
        self._index = self._stream.num_calls
        self._stream.num_calls += 1
        self._stream.tell(CallBegin(self._index, self._name))


class _CallReader:
    """A scanner of a call in the form of one JSON object: reads its name and arguments."""

    def __init__(self, stream: Stream) -> None:
        self.failed = False
        self._stream = stream
        self._scanner = JsonScanner()
        self._key = ""  # the key of the current value; "" while a key is read
        self._pieces: list[str] = []  # text of the current key or value
        self._name: str | None = None
        self._arguments: str | None = None  # arguments that came before the name
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
            # Before the end of the value counts: it may have come in the same piece of text.
            self._maybe_stream()
        match self._scanner.event:
            case "key":
                self._begin_value()
            case "value":
                self._end_value()
            case "failed":
                self.failed = True
        return end

    def finish(self) -> bool:
        """The object is complete. Returns whether it was a call."""
        if self._call is not None:
            return self._call.close()
        return self._name is not None and complete_call(
            self._stream,
            self._name,
            self._arguments or "{}",
        )

    def break_off(self) -> bool:
        """The text has ended within the object. Returns whether a partial call is emitted."""
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
        """Begin to stream the arguments if the name is known and they are an object."""
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
    """Arguments as a JSON object: an object itself, the content of a string, or {} for null."""
    if value.startswith("{"):
        return value
    if value == "null":
        return "{}"
    inner = decoded(value)
    if isinstance(inner, str):
        return inner  # `complete_call` checks that it is an object
    return None

"""What a form says in texts, read before its handler reads it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

# The answer says what is wrong with a form; a line in the log for each would be a client's to fill.
logging.getLogger("python_multipart").setLevel(logging.ERROR)

FORM = "multipart/form-data"
MAX_TEXT_LEN = 4_096  # bytes of a field
MAX_PARTS = 24
TRUE = ("true", "1", "yes", "on")


class _Read(Exception):
    """No more of the form matters."""


class _Texts:
    """The parts without a file name, as the parser comes by them."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._num_parts = 0
        self._head = bytearray()
        self._value = bytearray()
        self._disposition = b""
        self._name: str | None = None  # None: the part is a file or has no name

    def on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _Read
        self._disposition = b""
        self._value.clear()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._head += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        if self._head.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._head.clear()
        self._value.clear()

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name")
        is_text = name is not None and b"filename" not in options
        self._name = name.decode("utf-8", "replace") if name is not None and is_text else None

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name is None:
            return
        self._value += data[start:end]
        if len(self._value) > MAX_TEXT_LEN:
            raise _Read

    def on_part_end(self) -> None:
        if self._name is not None:
            text = self._value.decode("utf-8", "replace").strip()
            self.found[self._name] = text


def is_form(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == FORM


def texts_of_form(content_type: str, body: bytes) -> dict[str, str]:
    """Field -> text; of a field that comes twice, the last. Empty where the form cannot be read:
    its handler tells what is wrong with it."""
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        return {}
    texts = _Texts()
    calls: MultipartCallbacks = {
        "on_part_begin": texts.on_part_begin,
        "on_header_field": texts.on_header_field,
        "on_header_value": texts.on_header_value,
        "on_header_end": texts.on_header_end,
        "on_headers_finished": texts.on_headers_finished,
        "on_part_data": texts.on_part_data,
        "on_part_end": texts.on_part_end,
    }
    try:
        MultipartParser(boundary, calls).write(body)
    except _Read:
        pass
    except FormParserError:
        return {}
    return texts.found

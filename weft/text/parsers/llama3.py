"""Calls as JSON objects that are the whole answer, or stand behind the Python tag: Llama 3.1 to 3.3.

    {"name": "weather", "parameters": {"city": "Oslo"}}; {"name": ...}
    <|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}

Python code behind the tag stays text.
"""

from __future__ import annotations

from weft.text.parsers.calls import json_call
from weft.text.parsers.stream import Reading, Stream

TAG = "<|python_tag|>"


def llama3(stream: Stream) -> Reading[None]:
    found = (yield from stream.skip_space()) == "{"
    while found or (yield from stream.text_until(TAG)):
        found = False
        yield from _calls(stream)


def _calls(stream: Stream) -> Reading[None]:
    """Calls with semicolons between them."""
    more = True
    while more:
        yield from stream.skip_space()
        if not (yield from json_call(stream)):
            return
        yield from stream.skip_space()
        stream.settle()
        more = yield from stream.accept(";")

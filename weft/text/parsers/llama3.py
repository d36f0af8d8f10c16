"""Calls as JSON objects that begin a line, or stand behind the Python tag: Llama 3.1 to 3.3.

    {"name": "weather", "parameters": {"city": "Oslo"}}; {"name": ...}
    {"name": "news", "parameters": {}}
    <|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}

The first may only stand at the beginning of the answer, or behind the tag: other JSON is a part of what is said. Python
code behind the tag stays text.
"""

from __future__ import annotations

from weft.text.parsers.calls import json_call
from weft.text.parsers.stream import Reading, Stream

TAG = "<|python_tag|>"
TOOL_ROLE = "<|start_header_id|>ipython"  # Llama 3.2's own template shows no tag, but this


def llama3(stream: Stream) -> Reading[None]:
    found = (yield from stream.skip_space()) == "{"
    while found or (yield from stream.text_until(TAG)):
        found = False
        yield from _calls(stream)


def _calls(stream: Stream) -> Reading[None]:
    """Calls one behind the other, with semicolons, commas, tags or nothing but white space between them."""
    more = True
    while more:
        yield from stream.skip_space()
        if not (yield from json_call(stream)):
            return
        following = yield from stream.skip_space()
        stream.settle()
        for between in (";", ","):
            if (yield from stream.accept(between)):
                following = yield from stream.skip_space()
                break
        more = following == "{"

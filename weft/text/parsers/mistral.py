"""Calls behind a marker, as a list or one by one: Mistral 7B 0.3 to Mistral Large, and the newer form.

[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]
[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]...
"""

from __future__ import annotations

from weft.text.parsers.calls import json_arguments, json_array, json_call
from weft.text.parsers.stream import Reading, Stream

MARKER = "[TOOL_CALLS]"


def mistral(stream: Stream) -> Reading[None]:
    while (yield from stream.text_until(MARKER)):
        match (yield from stream.skip_space()):
            case "[":
                found = yield from json_array(stream)
            case "{":
                found = yield from json_call(stream)
            case _:
                head = yield from stream.read_until("[ARGS]")
                name = (head or "").partition("[CALL_ID]")[0].strip()
                found = yield from json_arguments(stream, name)
        if found:
            yield from stream.skip_space()
            stream.settle()

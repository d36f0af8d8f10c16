"""Calls between tags, each a JSON object: Hermes 2 Pro, Qwen 2.5 and Qwen 3.

<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from __future__ import annotations

from weft.text.parsers.calls import json_call
from weft.text.parsers.stream import Reading, Stream


def hermes(stream: Stream) -> Reading[None]:
    while (yield from stream.text_until("<tool_call>")):
        yield from stream.skip_space()
        if (yield from json_call(stream)):
            yield from stream.skip_space()
            yield from stream.accept("</tool_call>")
            yield from stream.skip_space()
            stream.settle()

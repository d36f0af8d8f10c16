"""Calls where nothing but calls was allowed: a JSON list of them, as `tools.forced_schema` describes it."""

from __future__ import annotations

from weft.text.parsers.calls import json_array
from weft.text.parsers.stream import Reading, Stream


def forced(stream: Stream) -> Reading[None]:
    yield from stream.skip_space()
    if (yield from json_array(stream)):
        yield from stream.skip_space()
        stream.settle()

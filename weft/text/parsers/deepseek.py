"""Calls between the special tokens of DeepSeek V3 and R1 (JSON in a code block) and of V3.1 (bare JSON).

The tokens are written with the vertical bar U+FF5C and the block U+2581.
"""

from __future__ import annotations

from weft.text.parsers.calls import json_arguments
from weft.text.parsers.stream import Reading, Stream

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def deepseek(stream: Stream) -> Reading[None]:
    while marker := (yield from stream.text_until(CALL_BEGIN, CALLS_BEGIN, CALLS_END)):
        if marker != CALL_BEGIN or (yield from _call(stream)):
            yield from stream.skip_space()
            stream.settle()


def _call(stream: Stream) -> Reading[bool]:
    name = yield from stream.read_until(SEPARATOR)
    in_block = name == "function"  # the type of the call, in V3; its name follows
    if in_block:
        name = yield from stream.read_until("\n")
        yield from stream.accept("```json")
    if name is None or not (yield from json_arguments(stream, name.strip())):
        return False
    yield from stream.skip_space()
    if in_block:
        yield from stream.accept("```")
        yield from stream.skip_space()
    yield from stream.accept(CALL_END)
    return True

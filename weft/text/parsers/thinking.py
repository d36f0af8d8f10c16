"""Reasoning between two markers before the answer: DeepSeek R1, Qwen 3 and others.

    <think>
    It is raining in Oslo, so ...
    </think>

    Take an umbrella.

Where the template has opened the reasoning in the prompt, the text begins inside of it.
"""

from __future__ import annotations

from weft.text.parsers.events import ReasoningText
from weft.text.parsers.stream import Reading, Stream


def thinking(stream: Stream, begin: str, end: str, *, inside: bool) -> Reading[None]:
    yield from stream.skip_space()
    opened = yield from stream.accept(begin)
    if not (opened or inside):
        return
    yield from stream.skip_space()
    stream.settle()
    if (yield from stream.text_until(end, kind=ReasoningText)):
        yield from stream.skip_space()
        stream.settle()

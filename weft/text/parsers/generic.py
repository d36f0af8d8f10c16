"""The format of calls for models whose chat template knows none: the prompt describes it
(`text/templates/tools_in_messages.py`), and a grammar holds the model to it.

An answer with tools begins with one of two marks:

    <tool_call>                                                    <answer>Take an umbrella.
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Without a choice between marks small models hardly ever call: SmolLM2-135M-Instruct called in 0 to 3
of 20 questions that need a tool, and in all with it (docs/guides/generic-tools.md). Calls are
written as Hermes's are, which many models have seen; text stays text, not a string of JSON, so it
can be streamed, and is not harder to write.
"""

from __future__ import annotations

from weft.text.parsers.calls import json_array, json_call
from weft.text.parsers.stream import Reading, Stream

ANSWER = "<answer>"
_ANSWER_END = "</answer>"  # described nowhere, but models like to close what they opened
CALL = "<tool_call>"
CALL_END = "</tool_call>"
# Around the arguments of a call of NAME.
AROUND = (f'{CALL}\n{{"name": "NAME", "arguments": ', f"}}\n{CALL_END}")


def generic(stream: Stream) -> Reading[None]:
    """Text after the mark of an answer, and calls as JSON objects between tags, before and within
    that text."""
    yield from stream.skip_space()
    marks: tuple[str, ...] = (ANSWER, CALL)
    if (yield from stream.accept(ANSWER)):
        stream.settle()
        marks = (CALL, _ANSWER_END)
    while mark := (yield from stream.text_until(*marks)):
        if mark == ANSWER:  # text before it is reasoning that nobody took out
            stream.settle()
            marks = (CALL, _ANSWER_END)
        elif mark == _ANSWER_END:
            if (yield from stream.skip_space()) in ("", CALL[0]):
                stream.settle()
        elif (yield from _calls(stream)):
            yield from stream.skip_space()
            yield from stream.accept(CALL_END)
            yield from stream.skip_space()
            stream.settle()


def _calls(stream: Stream) -> Reading[bool]:
    """Read a call, or a list of calls. False if the text is something else."""
    if (yield from stream.skip_space()) == "[":
        return (yield from json_array(stream))
    return (yield from json_call(stream))

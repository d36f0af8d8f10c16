"""Readers of tool calls in JSON and of reasoning: one generator for each family of models.

A reader is a few lines of code over a `Stream`: it emits plain text, consumes markers, and leaves
the calls to `calls.py`. `settle` means that the consumed text is understood and not a part of the
answer; other consumed text is emitted as text again. Calls in Python's syntax are in `pythonic.py`,
in XML in `xml_calls.py`, Gemma's in `gemma.py`, and gpt-oss's messages in `harmony.py`.
`formats.py` assigns readers to models.
"""

from __future__ import annotations

import re
from functools import partial

from weft.text.parsers.calls import json_arguments, json_array, json_call, keyed_call, section
from weft.text.parsers.events import ReasoningText
from weft.text.parsers.stream import Reading, Stream

LLAMA3_TAG = "<|python_tag|>"
LLAMA3_TOOL_ROLE = "<|start_header_id|>ipython"  # Llama 3.2's template has this, but no tag
MISTRAL_MARKER = "[TOOL_CALLS]"
# DeepSeek's tokens are written with the vertical bar U+FF5C and the block U+2581.
DEEPSEEK_CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
DEEPSEEK_CALLS_END = "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL_BEGIN = "<｜tool▁call▁begin｜>"
DEEPSEEK_CALL_END = "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
KIMI_CALL_BEGIN = "<|tool_call_begin|>"
KIMI_SECTION_BEGIN = "<|tool_calls_section_begin|>"
PHI4_BEGIN = "<|tool_call|>"
COHERE_BEGIN = "<|START_ACTION|>"
APERTUS_BEGIN = "<|tools_prefix|>"
HUNYUAN_BEGIN = '<tool_calls>[{"name"'  # from the instructions in its template
_KIMI_NUMBER = re.compile(r":[0-9]+$")
# Granite 3.2 generates these lines, sometimes with the contraction; Granite 3.3 generates the tags.
GRANITE_BEGINS = ("Here is my thought process:", "Here's my thought process:", "<think>")
GRANITE_ENDS = ("Here is my response:", "Here's my response:", "</think>")


def hermes(stream: Stream) -> Reading[None]:
    """Calls as JSON objects, each between tags: Hermes 2 Pro, Qwen 2.5 and Qwen 3.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>
    """
    while (yield from stream.text_until("<tool_call>")):
        yield from stream.skip_space()
        if (yield from json_call(stream)):
            yield from stream.skip_space()
            yield from stream.accept("</tool_call>")
            yield from stream.skip_space()
            stream.settle()


def llama3(stream: Stream) -> Reading[None]:
    """Calls as JSON objects at the beginning of a line or after the Python tag: Llama 3.1 to 3.3.

        {"name": "weather", "parameters": {"city": "Oslo"}}; {"name": ...}
        {"name": "news", "parameters": {}}
        <|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}

    The first call must be at the beginning of the answer or after the tag: other JSON is a part of
    the answer. Python code after the tag stays text.
    """
    found = (yield from stream.skip_space()) == "{"
    while found or (yield from stream.text_until(LLAMA3_TAG)):
        found = False
        yield from _llama3_calls(stream)


def _llama3_calls(stream: Stream) -> Reading[None]:
    """Read calls that are separated by semicolons, commas or only white space."""
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


def mistral(stream: Stream) -> Reading[None]:
    """Calls after a marker, as a list or single: Mistral 7B 0.3 to Large, and newer.

    [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]
    [TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]...
    """
    while (yield from stream.text_until(MISTRAL_MARKER)):
        match (yield from stream.skip_space()):
            case "[":
                found = yield from json_array(stream)
            case "{":
                found = yield from json_call(stream)
            case _:
                head = yield from stream.read_until("[ARGS]")
                name, _, _ = (head or "").partition("[CALL_ID]")
                found = yield from json_arguments(stream, name.strip())
        if found:
            yield from stream.skip_space()
            stream.settle()


def deepseek(stream: Stream) -> Reading[None]:
    """Calls between the special tokens of DeepSeek V3 and R1, and of V3.1."""
    while True:
        marker = yield from stream.text_until(
            DEEPSEEK_CALL_BEGIN,
            DEEPSEEK_CALLS_BEGIN,
            DEEPSEEK_CALLS_END,
        )
        if not marker:
            return
        if marker != DEEPSEEK_CALL_BEGIN or (yield from _deepseek_call(stream)):
            yield from stream.skip_space()
            stream.settle()


def _deepseek_call(stream: Stream) -> Reading[bool]:
    """Read a call. V3 and R1 put the arguments into a code block, V3.1 does not."""
    name = yield from stream.read_until(DEEPSEEK_SEPARATOR)
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
    yield from stream.accept(DEEPSEEK_CALL_END)
    return True


def kimi_k2(stream: Stream) -> Reading[None]:
    """Calls in a section, each with a number after its name: Kimi K2.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0
    <|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>
    """
    yield from section(
        stream,
        _kimi_call,
        begins=(KIMI_SECTION_BEGIN, "<|tool_call_section_begin|>"),
        call_begin=KIMI_CALL_BEGIN,
        ends=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    )


def _kimi_call(stream: Stream) -> Reading[bool]:
    head = yield from stream.read_until("<|tool_call_argument_begin|>")
    if head is None:
        return False
    name = _KIMI_NUMBER.sub("", head.strip()).removeprefix("functions.")
    if not (yield from json_arguments(stream, name)):
        return False
    yield from stream.skip_space()
    yield from stream.accept("<|tool_call_end|>")
    return True


def minimax_m1(stream: Stream) -> Reading[None]:
    """Calls as JSON objects, one per line, between a pair of tags: MiniMax M1.

    <tool_calls>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_calls>
    """
    yield from section(stream, json_call, begins=("<tool_calls>",), ends=("</tool_calls>",))


def hunyuan_a13b(stream: Stream) -> Reading[None]:
    """A JSON list of calls between a pair of tags: Hunyuan A13B.

    <tool_calls>[{"name": "weather", "arguments": {"city": "Oslo"}}]</tool_calls>
    """
    yield from section(stream, json_array, begins=("<tool_calls>",), ends=("</tool_calls>",))


def cohere(stream: Stream) -> Reading[None]:
    """A list of actions between tokens: Command R7B, Command A and newer.

    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Oslo"}}
    ]<|END_ACTION|>
    """
    yield from section(stream, json_array, begins=(COHERE_BEGIN,), ends=("<|END_ACTION|>",))


def apertus(stream: Stream) -> Reading[None]:
    """A list of calls between tokens; the name of a call is the key of its arguments: Apertus.

    <|tools_prefix|>[{"weather": {"city": "Oslo"}}]<|tools_suffix|>
    """
    read = partial(json_array, read_call=keyed_call)
    yield from section(stream, read, begins=(APERTUS_BEGIN,), ends=("<|tools_suffix|>",))


def granite(stream: Stream) -> Reading[None]:
    """A list of calls after a token, or as the whole answer: Granite 3.0 to 3.3.

    <|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]
    """
    found = (yield from stream.skip_space()) == "["
    while found or (yield from stream.text_until("<|tool_call|>", "<tool_call>")):
        found = False
        yield from stream.skip_space()
        if (yield from json_array(stream)):
            yield from stream.skip_space()
            stream.settle()


def granite_20b(stream: Stream) -> Reading[None]:
    """Calls as JSON objects, each after a tag: Granite 20B Functioncalling.

    <function_call> {"name": "weather", "arguments": {"city": "Oslo"}}
    """
    while (yield from stream.text_until("<function_call>")):
        yield from stream.skip_space()
        if (yield from json_call(stream)):
            yield from stream.skip_space()
            stream.settle()


def phi4(stream: Stream) -> Reading[None]:
    """Calls between tags, or a list of calls after a word: the two templates of Phi-4-mini.

    <|tool_call|>{"name": "weather", "arguments": {"city": "Oslo"}}<|/tool_call|>
    functools[{"name": "weather", "arguments": {"city": "Oslo"}}]
    """
    while (yield from stream.text_until(PHI4_BEGIN, "functools")):
        if (yield from stream.skip_space()) == "[":
            found = yield from json_array(stream)
        else:
            found = yield from json_call(stream)
        if found:
            yield from stream.skip_space()
            yield from stream.accept("<|/tool_call|>")
            yield from stream.skip_space()
            stream.settle()


def forced(stream: Stream) -> Reading[None]:
    """A JSON list of calls, from a completion whose schema allowed nothing else."""
    yield from stream.skip_space()
    found = yield from json_array(stream)
    # The beginning of a call that was truncated is no answer.
    if found or not (yield from stream.more()):
        yield from stream.skip_space()
        stream.settle()


def reasoning(stream: Stream, begin: str, end: str, *, inside: bool) -> Reading[None]:
    """Reasoning between two markers before the answer: DeepSeek R1, Qwen 3 and others.

        <think>
        It is raining in Oslo, so ...
        </think>

        Take an umbrella.

    `inside`: the prompt opened the reasoning, so the text begins inside it.
    """
    yield from stream.skip_space()
    opened = yield from stream.accept(begin)
    if not opened and not inside:
        return
    yield from stream.skip_space()
    stream.settle()
    if (yield from stream.text_until(end, kind=ReasoningText)):
        yield from stream.skip_space()
        stream.settle()


def kimi_k2_reasoning(stream: Stream, begin: str, end: str, *, inside: bool) -> Reading[None]:
    """Like `reasoning`, but the reasoning may also end with the first call: Kimi K2 Thinking."""
    yield from stream.skip_space()
    opened = yield from stream.accept(begin)
    if not opened and not inside:
        return
    yield from stream.skip_space()
    stream.settle()
    marker = yield from stream.text_until(end, KIMI_SECTION_BEGIN, kind=ReasoningText)
    if marker == end:
        yield from stream.skip_space()
        stream.settle()


def reasoning_before_tag(
    stream: Stream,
    begin: str,
    end: str,
    *,
    inside: bool,
    tag: str,
    begins: tuple[str, ...] = (),
    ends: tuple[str, ...] = (),
) -> Reading[None]:
    """Like `reasoning`, with an answer that may be inside a `tag`: Granite 3.2 and 3.3, Hunyuan
    A13B.

    <think>...</think><response>...</response>

    `begins` and `ends`: alternatives of the marks `begin` and `end`.
    """
    yield from stream.skip_space()
    opened = yield from stream.accept_one(begin, *begins)
    if not opened and not inside:
        return
    yield from stream.skip_space()
    stream.settle()
    if not (yield from stream.text_until(end, *ends, kind=ReasoningText)):
        return
    yield from stream.skip_space()
    stream.settle()
    if not (yield from stream.accept(f"<{tag}>")):
        return
    yield from stream.skip_space()
    stream.settle()
    yield from stream.text_until(f"</{tag}>")
    stream.settle()


def cohere_reasoning(stream: Stream, begin: str, end: str, *, inside: bool) -> Reading[None]:
    """Reasoning, which may be missing, and an answer between tokens: Cohere.

        <|START_THINKING|>It is raining.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>

    Newer models use TEXT instead of RESPONSE.
    """
    yield from stream.skip_space()
    opened = yield from stream.accept(begin)
    if opened or inside:
        yield from stream.skip_space()
        stream.settle()
        if not (yield from stream.text_until(end, kind=ReasoningText)):
            return
        yield from stream.skip_space()
        stream.settle()
    for kind in ("RESPONSE", "TEXT"):
        if (yield from stream.accept(f"<|START_{kind}|>")):
            stream.settle()
            yield from stream.text_until(f"<|END_{kind}|>")
            stream.settle()
            return

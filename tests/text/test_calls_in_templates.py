"""What the templates of families write of calls in the history is what their parsers read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.text.calling_templates import CALLING_TEMPLATES, GPT_OSS, KIMI_K2
from tests.text.parsed import calls_in, parse
from tests.text.written_calls import NAMES, SCHEMAS
from weft.text.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, find_formats
from weft.text.templates.chat_template import ChatTemplate

ARGUMENTS = {"s": "Oslo <b>", "n": 3, "b": True, "a": [1, {"k": "}"}], "o": {"y": None}}


def call(name: str, arguments: dict[str, Any], id: str = "call_1") -> dict[str, Any]:
    """As clients send it: the arguments are a text."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": id, "type": "function", "function": function}


def rendered(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate({"default": source}, {}).render(messages, **options)


@pytest.mark.parametrize("family", CALLING_TEMPLATES)
def test_calls_that_a_template_writes_are_read_back(family: str) -> None:
    tools, _, source = CALLING_TEMPLATES[family]
    calls = [call("f", ARGUMENTS)]
    if family != "gpt-oss":  # its messages have one call each
        calls.append(call("g", {}, "call_2"))
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    text = rendered(source, messages, add_generation_prompt=False)
    parser = TOOL_FORMATS[tools].parser(NAMES, eager=False, schemas=SCHEMAS)
    found = calls_in(parse(parser, [text]))
    assert found == [("f", ARGUMENTS), ("g", {})][: len(calls)]


@pytest.mark.parametrize("family", CALLING_TEMPLATES)
def test_formats_are_found_in_the_template(family: str) -> None:
    tools, reasoning, source = CALLING_TEMPLATES[family]
    found = find_formats("auto", "auto", [source])
    assert found.tools == TOOL_FORMATS[tools]
    assert found.reasoning == (REASONING_FORMATS[reasoning] if reasoning else None)


def test_ids_of_calls_have_their_names_where_the_model_reads_them_there() -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call("f", {}, "call_a"), call("g", {}, "call_b")],
        },
        {"role": "tool", "content": "1", "tool_call_id": "call_b"},
        {"role": "tool", "content": "2", "tool_call_id": "call_a"},
        {"role": "assistant", "content": "", "tool_calls": [call("f", {}, "functions.f:7")]},
        {"role": "tool", "content": "3", "tool_call_id": "functions.f:7"},
        {"role": "assistant", "content": "", "tool_calls": [call("f", {}, "toolu_c")]},
    ]
    text = rendered(KIMI_K2, messages)
    pieces = text.split("<|tool_call_begin|>")[1:]
    ids = [piece.split("<|tool_call_argument_begin|>")[0] for piece in pieces]
    assert ids == ["functions.f:0", "functions.g:1", "functions.f:7", "functions.f:3"]
    returns = [line for line in text.splitlines() if line.startswith("## Return of")]
    assert [line.split()[-1] for line in returns] == [
        "functions.g:1",
        "functions.f:0",
        "functions.f:7",
    ]


def test_reasoning_beside_a_call_is_the_thinking_of_gpt_oss() -> None:
    message = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "tool_calls": [call("f", {"n": 1})],
    }
    begin = "<|start|>assistant<|channel|>analysis<|message|>"
    of_call = (
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"n": 1}<|call|>'
    )
    options = {"add_generation_prompt": False}
    assert rendered(GPT_OSS, [message], **options) == f"{begin}Hm.<|end|>{of_call}"
    # The template takes content for reasoning there, and refuses to have both.
    message["content"] = "I say."
    assert rendered(GPT_OSS, [message], **options) == f"{begin}I say.<|end|>{of_call}"

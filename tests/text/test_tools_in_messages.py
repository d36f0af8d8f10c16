"""Templates that know no calls get tools, calls and results as text, in turns that they accept."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import pytest

from tests.text.parsed import answer_text, calls_in, parse
from tests.text.template_families import CHATML, CONVERSATIONS, FAMILIES, GEMMA, TOOLS, Message
from weft.text.parsers.formats import TOOL_FORMATS, find_formats
from weft.text.templates.chat_template import ChatTemplate, TemplateError
from weft.text.templates.tools_in_messages import described

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
GENERIC = TOOL_FORMATS["generic"]
# The format that each family's template shows; the others know no calls that parsers read.
SHOWN = {
    "Llama 3.2": "llama3",
    "Mistral 3": "mistral",
    "Mistral Small": "mistral",
    "Qwen 2.5": "hermes",
    "Qwen 3": "hermes",
    "Hermes": "hermes",
}
TAKES_TURNS = ("Llama 2", "Mistral 3", "Gemma")  # refuse two messages of the user in a row

USER = {"role": "user", "content": "How is it?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def call(id: str, name: str = "weather", arguments: Any = '{"city": "Oslo"}') -> Message:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def asks(*calls: Message, content: Any = None) -> Message:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def result(id: str, content: Any = "rain") -> Message:
    return {"role": "tool", "tool_call_id": id, "content": content}


def rendered(source: str, messages: list[Message], **options: Any) -> str:
    options = {"tools": TOOLS, "tools_in_messages": True, **options}
    return template_of(source).render(copy.deepcopy(messages), **options)


@cache  # to compile it takes longer than to render
def template_of(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, SPECIAL)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_format_of_each_family_is_judged_by_its_template(family: str) -> None:
    found = find_formats("auto", "auto", [FAMILIES[family]]).tools
    assert found == TOOL_FORMATS[SHOWN.get(family, "generic")]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_template_takes_tools_calls_and_results(family: str, conversation: str) -> None:
    messages = CONVERSATIONS[conversation]
    if conversation == "two of the user" and family in TAKES_TURNS:
        with pytest.raises(TemplateError):
            rendered(FAMILIES[family], messages)
        return
    text = rendered(FAMILIES[family], messages)
    if family != "Mistral 3":  # it has the system's text only where the user speaks last
        assert text.count(described(TOOLS)) == 1
    found = calls_in(parse(GENERIC.parser(frozenset(["weather"]), eager=False), [text]))
    told = [one for message in messages for one in message.get("tool_calls", ())]
    assert [arguments for _, arguments in found] == [one["function"]["arguments"] for one in told]
    for message in messages:
        if message["role"] == "tool":
            assert f"<tool_response>\n{message['content']}\n</tool_response>" in text


ANSWERS = [
    "<answer>Take an umbrella.",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    '<answer>Well.\n<tool_call>\n{"name": "weather", "arguments": {"city":"Oslo"}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "news", "arguments": {"of": [1]}}\n</tool_call>',
]


@pytest.mark.pairs
@pytest.mark.parametrize("before", [[], [SYSTEM]])
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_prompt_begins_with_this_one_and_its_answer(
    family: str, answer: str, before: list[Message]
) -> None:
    source = FAMILIES[family]
    messages = [*before, USER]
    first = rendered(source, messages)
    events = parse(GENERIC.parser(frozenset(["weather", "news"]), eager=False), [answer])
    found = calls_in(events)
    given = [call(f"call_{n}", name, json.dumps(of)) for n, (name, of) in enumerate(found)]
    if '":"' in answer:  # as the client got it
        given[0]["function"]["arguments"] = '{"city":"Oslo"}'
    turn: Message = {"role": "assistant", "content": answer_text(events)}
    if given:
        turn["tool_calls"] = given
    after = [result(one["id"]) for one in given] or [USER]
    second = rendered(source, [*messages, turn, *after])
    if keeps_prompts(source):
        assert second.startswith(first)
        assert second[len(first) :].lstrip().startswith(answer)


@cache
def keeps_prompts(source: str) -> bool:
    """Whether a prompt of this template, and its answer, begin the next one if nobody has tools."""
    before = [SYSTEM, USER]
    answered = [*before, {"role": "assistant", "content": "Fine."}, USER]
    try:
        first = rendered(source, before, tools=None)
        return rendered(source, answered, tools=None).startswith(first)
    except TemplateError:  # a system's text is the user's, then
        first = rendered(source, before[1:], tools=None)
        return rendered(source, answered[1:], tools=None).startswith(first)


def test_most_templates_keep_prompts() -> None:
    assert sum(map(keeps_prompts, FAMILIES.values())) >= 10


def test_a_template_without_a_system_has_it_before_the_users_text() -> None:
    source = FAMILIES["Mistral 1"]
    text = rendered(source, [USER])
    assert text == f"<s>[INST] {described(TOOLS)}\n\nHow is it? [/INST]"
    text = rendered(source, [SYSTEM, USER])
    assert text == f"<s>[INST] Be brief.\n\n{described(TOOLS)}\n\nHow is it? [/INST]"
    text = rendered(source, [{"role": "assistant", "content": "Hi."}, USER])
    assert text.startswith(f"<s>[INST] {described(TOOLS)} [/INST]<answer>Hi.</s>")


def test_a_template_with_one_has_it_behind_the_systems_text() -> None:
    text = rendered(CHATML, [SYSTEM, USER], add_generation_prompt=False)
    assert text.startswith(f"<|im_start|>system\nBe brief.\n\n{described(TOOLS)}<|im_end|>\n")
    parts = {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}
    assert rendered(CHATML, [parts, USER], add_generation_prompt=False) == text


def test_results_come_in_the_order_of_their_calls_and_before_what_the_user_says() -> None:
    calls = asks(call("a"), call("b"), call("c"))
    results = [result("c", "3"), result("x", "?"), result("a", "1"), result("b", "2")]
    text = rendered(GEMMA, [USER, calls, *results, {"role": "user", "content": "So?"}])
    last = text.split("<turn>user\n")[-1].split("</turn>")[0].strip()
    shown = "\n".join(f"<tool_response>\n{n}\n</tool_response>" for n in ("1", "2", "3", "?"))
    assert last == f"{shown}\nSo?"


def test_results_without_ids_are_distinguished_by_their_names() -> None:
    calls = asks(call("", "f"), call("", "g"))
    results = [{"role": "tool", "name": name, "content": name} for name in ("g", "f")]
    text = rendered(CHATML, [USER, calls, *results])
    assert text.index("\nf\n</tool_response>") < text.index("\ng\n</tool_response>")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city":  "Zürich \\ud83d"}', '{"city":  "Zürich \\ud83d"}'),
        ({"city": "Zürich"}, '{"city": "Zürich"}'),
        ("", "{}"),
        (None, "{}"),
        ('{"ci', '"{\\"ci"'),
        ("[1]", '"[1]"'),
        ([1], "[1]"),
    ],
)
def test_arguments_of_any_kind_go_on(arguments: Any, shown: str) -> None:
    text = rendered(CHATML, [USER, asks(call("a", 'so "odd"', arguments))])
    assert f'<tool_call>\n{{"name": "so \\"odd\\"", "arguments": {shown}}}\n</tool_call>' in text


def test_without_tools_answers_have_no_mark_and_calls_are_still_there() -> None:
    messages = [USER, asks(call("a"), content="Well."), result("a"), USER]
    text = rendered(CHATML, messages, tools=None)
    assert "<answer>" not in text
    assert 'assistant\nWell.<tool_call>\n{"name": "weather"' in text
    assert "user\n<tool_response>\nrain\n</tool_response>\nHow is it?<|im_end|>" in text


def test_pictures_in_results_stay_where_they_are() -> None:
    parts = [{"type": "text", "text": "See:"}, {"type": "image"}]
    messages = [USER, asks(call("a")), result("a", parts)]
    text = rendered(CHATML, messages, marks={"image": "<picture>"})
    assert "<tool_response>\nSee:\n<picture>\n\n</tool_response>" in text


def test_an_answer_goes_on_where_it_ended() -> None:
    messages = [USER, {"role": "assistant", "content": "Take an"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert rendered(CHATML, messages, **options).endswith("assistant\n<answer>Take an")

"""A system message behind others keeps its place, also where the template does not take it
there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.text.late_system import BLOCK, STRICT
from tests.text.template_families import CHATML, FAMILIES, GEMMA, Message
from weft.text.templates.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "Hi"}
ANSWER: Message = {"role": "assistant", "content": "Hello."}
LATE: Message = {"role": "system", "content": "It is late."}
TURNS = [
    [SYSTEM, USER, LATE],
    [SYSTEM, LATE, USER],
    [USER, LATE],
    [USER, LATE, USER],
    [USER, ANSWER, LATE, USER],
    [USER, ANSWER, {**LATE, "role": "developer"}],
]


def rendered(source: str, messages: list[Message], **options: Any) -> tuple[str, tuple[str, ...]]:
    found = ChatTemplate({"default": source}, SPECIAL).rendered(messages, **options)
    return found.text, found.warnings


def test_it_becomes_text_of_the_user_in_its_place() -> None:
    text, warnings = rendered(STRICT, [SYSTEM, USER, LATE])
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\nHi\n{BLOCK}<|im_end|>\n<|im_start|>assistant\n"
    )
    [warning] = warnings
    assert warning.startswith("message 3 of the prompt is a system message behind others")


def test_system_messages_directly_after_the_first_are_merged_into_it() -> None:
    developer = {**LATE, "role": "developer"}
    text, warnings = rendered(STRICT, [SYSTEM, developer, USER])
    assert text.startswith("<|im_start|>system\nBe brief.\nIt is late.<|im_end|>\n<|im_start|>user")
    assert not warnings


def test_a_template_that_takes_it_gets_it_as_it_is() -> None:
    text, warnings = rendered(CHATML, [USER, LATE])
    assert "<|im_start|>system\nIt is late.<|im_end|>" in text
    assert not warnings


@pytest.mark.parametrize("messages", TURNS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_shows_it_in_its_place(family: str, messages: list[Message]) -> None:
    if messages[0] is SYSTEM and family == "Mistral 1":
        return  # it has no system at all
    text, _ = rendered(FAMILIES[family], messages)
    place = next(n for n, one in enumerate(messages) if one["content"] == LATE["content"])
    before = [text.rfind(one["content"]) for one in messages[:place] if one not in messages[place:]]
    if family != "Mistral 3":  # it has the first one in the user's last turn
        assert text.index(LATE["content"]) > max(before, default=-1)


@pytest.mark.parametrize("source", [STRICT, GEMMA])
def test_the_next_prompt_keeps_it_where_it_was(source: str) -> None:
    before = [USER, LATE]
    first, _ = rendered(source, before, add_generation_prompt=False)
    second, _ = rendered(source, [*before, ANSWER, USER, LATE], add_generation_prompt=False)
    assert second.startswith(first.rstrip())


def test_a_result_of_a_tool_and_a_late_system_are_one_turn_where_tools_are_text() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        LATE,
    ]
    text, _ = rendered(GEMMA, messages, tools_in_messages=True)
    assert f"<tool_response>\nrain\n</tool_response>\n{BLOCK}" in text

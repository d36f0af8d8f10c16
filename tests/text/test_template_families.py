"""Templates of the well-known families give what they give in transformers, for conversations of
all kinds."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from jinja2.exceptions import TemplateError as JinjaError
from transformers.utils.chat_template_utils import render_jinja_template

from tests.text.template_families import CONVERSATIONS, FAMILIES, TOOLS, Message
from weft.text.templates.chat_template import ChatTemplate, TemplateError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {name: ChatTemplate({"default": source}, SPECIAL) for name, source in FAMILIES.items()}
# read only lists of parts, or ask whether content is none
READS_LISTS = {"Mistral Small", "Gemma", "macros over parts"}
READS_NULL = {"DeepSeek R1 distilled", "macros over parts"}


def as_sent(conversation: list[Message]) -> list[Message]:
    """As clients send it: the arguments of calls are a text."""
    sent = copy.deepcopy(conversation)
    for message in sent:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return sent


def as_expected(family: str, conversation: list[Message]) -> list[Message]:
    """What transformers is given. A template that takes content for a text would write parts in the
    words of Python, and null as "None": it gets texts."""
    given = copy.deepcopy(conversation)
    for message in given:
        if isinstance(message["content"], list) and family not in READS_LISTS:
            message["content"] = "\n".join(part["text"] for part in message["content"])
        if message["content"] is None and family not in READS_NULL:
            message["content"] = ""
    return given


def theirs(family: str, conversation: list[Message], **options: Any) -> str | None:
    """None for a conversation that the template refuses."""
    try:
        given = as_expected(family, conversation)
        [text], _ = render_jinja_template([given], chat_template=FAMILIES[family], **options)
    except (JinjaError, TypeError):
        return None
    return str(text)


def ours(family: str, conversation: list[Message], **options: Any) -> str | None:
    try:
        return TEMPLATES[family].render(as_sent(conversation), **options)
    except TemplateError:
        return None


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_that_of_transformers(family: str, conversation: str) -> None:
    messages = CONVERSATIONS[conversation]
    num_rendered = 0
    for tools in (None, TOOLS):
        for prompt in (False, True):
            options = {"tools": tools, "add_generation_prompt": prompt}
            expected = theirs(family, messages, **SPECIAL, **options)
            assert ours(family, messages, **options) == expected
            num_rendered += expected is not None
    assert num_rendered or family in (
        "Llama 2",
        "Llama 3.2",
        "Mistral 1",
        "Mistral 3",
        "Mistral Small",
        "Gemma",
    )


def test_arguments_of_templates_reach_them() -> None:
    kwargs = {"enable_thinking": False}
    messages = CONVERSATIONS["one question"]
    expected = theirs("Qwen 3", messages, add_generation_prompt=True, **SPECIAL, **kwargs)
    assert ours("Qwen 3", messages, kwargs=kwargs) == expected
    assert expected is not None
    assert expected.endswith("</think>\n\n")

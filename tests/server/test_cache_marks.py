"""Where a block that is marked with `cache_control` ends in the prompt, for blocks of every
kind."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from weft.server.anthropic.marks import messages_marks
from weft.server.anthropic.models import MessagesRequest
from weft.server.anthropic.translate import sampled_request
from weft.server.chat.custom_tools import as_functions
from weft.server.chat.marks import chat_marks
from weft.server.chat.models import ChatRequest
from weft.server.errors import ApiError
from weft.server.fields.cache_control import CacheMark, new_stamp, num_alike
from weft.text.templates.chat_template import ChatTemplate

TEMPLATE = ChatTemplate(
    {
        "default": "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\\n{% endfor %}</tools>{% endif %}"
        "{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}"
        "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }} "
        "{{ call.function.arguments | tojson }}</call>{% endfor %}</{{ message.role }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    },
    {},
)
MARK = {"cache_control": {"type": "ephemeral"}}


def rendered(body: ChatRequest) -> str:
    messages = [msgspec.to_builtins(message) for message in body.messages]
    return TEMPLATE.render(
        messages,
        tools=as_functions(body.tools),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
    )


def beginnings(body: ChatRequest, marks: list[CacheMark[ChatRequest]]) -> list[str]:
    """The prompt up to each mark."""
    text = rendered(body)
    found = []
    for mark in marks:
        varied = rendered(mark.varied(new_stamp()))
        assert varied != text
        found.append(text[: num_alike(text, varied)])
    return found


def anthropic(**fields: Any) -> list[str]:
    body = msgspec.convert({"max_tokens": 1, "messages": HELLO, **fields}, MessagesRequest)
    return beginnings(sampled_request(body), messages_marks(body))


def chat(**fields: Any) -> list[str]:
    body = msgspec.convert({"messages": HELLO, **fields}, ChatRequest)
    return beginnings(body, chat_marks(body))


HELLO = [{"role": "user", "content": "hello"}]
USE = {"type": "tool_use", "id": "t", "name": "look", "input": {"at": "door"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "open"}


def test_the_end_of_each_kind_of_block_is_found() -> None:
    tools = [{"name": "look"} | MARK, {"name": "go"}]
    system = [{"type": "text", "text": "be kind"} | MARK, {"type": "text", "text": "and brief"}]
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [USE | MARK]},
        {"role": "user", "content": [RESULT | MARK, {"type": "text", "text": "and now?"}]},
    ]
    found = anthropic(tools=tools, system=system, messages=messages)
    ends = ['"look"', "be kind", '{"at": "door"', "open"]
    for beginning, end in zip(found, ends, strict=True):
        assert end in beginning[-150:], found
    assert "go" not in found[0]
    assert found[1].endswith("be kind")
    assert found[2].endswith('{"at": "door"')
    assert found[3].endswith("<tool>open")


def test_spaces_that_the_template_cuts_off_are_no_part_of_it() -> None:
    [found] = anthropic(system=[{"type": "text", "text": "be kind \n"} | MARK])
    assert found == "<system>be kind"


def test_the_body_as_a_whole_marks_the_last_block_that_may_be() -> None:
    thought = {"type": "thinking", "thinking": "hm"}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "I see"}, thought]}
    [found] = anthropic(messages=[*HELLO, answer, *HELLO], **MARK)
    assert found.endswith("<user>hello")
    [found] = anthropic(messages=[*HELLO, answer], **MARK)
    assert found.endswith("<assistant>I see")
    [found] = anthropic(system="be kind", messages=[], **MARK)
    assert found == "<system>be kind"


def test_the_last_block_may_be_marked_twice_alike() -> None:
    block = {"type": "text", "text": "hello"} | MARK
    [found] = anthropic(messages=[{"role": "user", "content": [block]}], **MARK)
    assert found == "<user>hello"


def test_thoughts_cannot_be_marked() -> None:
    thought = {"type": "thinking", "thinking": "hm"} | MARK
    with pytest.raises(ApiError, match="cannot be set on thinking blocks"):
        anthropic(messages=[*HELLO, {"role": "assistant", "content": [thought]}, *HELLO])


def test_marks_of_chat_requests_are_found_where_litellm_and_openrouter_put_them() -> None:
    function = {"name": "look", "parameters": {}}
    call = {"id": "t", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    found = chat(
        tools=[{"type": "function", "function": function | MARK}],
        messages=[
            {"role": "system", "content": "be kind"} | MARK,
            {"role": "user", "content": [{"type": "text", "text": "hello"} | MARK]},
            {"role": "assistant", "tool_calls": [call]} | MARK,
            {"role": "tool", "tool_call_id": "t", "content": "open"},
        ],
    )
    assert [one.rpartition(">")[2] for one in found[1:]] == ["be kind", "hello", 'look {"at": 1']
    assert '"look"' in found[0]
    assert "be kind" not in found[0]
    assert not any("cache_control" in one for one in found)


def test_the_common_prefix_of_two_sequences_is_counted() -> None:
    for length in range(12):
        left = [*range(length), -1, 7, 7]
        right = [*range(length), -2, 7]
        assert num_alike(left, right) == length
    assert num_alike("abc", "abcd") == 3
    assert num_alike("", "x") == 0

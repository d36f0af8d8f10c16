"""The Messages API with Anthropic's own SDK."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.server.fake import HANG_S, MODEL, RunningServer, as_bytes, running
from tests.server.scripted import CALL, OSLO, THOUGHT, WEATHER, record_prompts, say
from weft.config.limits import Limits
from weft.config.server import ServerConfig
from weft.server.anthropic.models import CountRequest, OutputConfig
from weft.server.anthropic.translate import chat_request
from weft.server.chat.sealed import Opener

HI: list[Any] = [{"role": "user", "content": "Hi"}]
TOOLS: list[Any] = [{"name": "weather", "description": "of a city", "input_schema": WEATHER}]


@pytest.fixture
def client(tool_server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=tool_server.url, api_key="none", max_retries=0, timeout=HANG_S
    ) as client:
        yield client


def ask(client: anthropic.Anthropic, **options: Any) -> Any:
    return client.messages.create(**{"model": MODEL, "max_tokens": 500, "messages": HI, **options})


def test_a_message_is_answered(client: anthropic.Anthropic, tool_server: RunningServer) -> None:
    say(tool_server, "Hello")
    sampling = {"temperature": 0.5, "top_k": 7}  # newer SDKs do not know them
    answer = ask(client, system="Be kind.", extra_body=sampling, metadata={"user_id": "me"})
    assert (answer.role, answer.type, answer.model, answer.stop_reason) == (
        "assistant",
        "message",
        MODEL,
        "end_turn",
    )
    assert answer.id.startswith("msg_")
    [block] = answer.content
    assert (block.type, block.text) == ("text", "Hello")
    [request] = tool_server.engine.seen
    num_prompt = len(request.input_ids) // 4
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == num_prompt
    assert usage.output_tokens == 6
    params = request.sampling
    assert (params.temperature, params.top_k, params.max_new_tokens, request.user) == (
        0.5,
        7,
        500,
        "me",
    )


def test_system_blocks_results_and_continuation_reach_the_template(
    client: anthropic.Anthropic, tool_server: RunningServer
) -> None:
    prompts: list[str] = []
    tool_server.engine.script = lambda ids: (
        prompts.append(bytes(i for i in ids if i < 256).decode()) or as_bytes("x")
    )
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Rain?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": OSLO},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "rain"}],
                },
                {"type": "text", "text": "So?"},
            ],
        },
        {"role": "assistant", "content": "It"},
    ]
    ask(client, messages=history, system=[{"type": "text", "text": "Be kind."}], tools=TOOLS)
    assert prompts == [
        "system\nBe kind.\nuser\nRain?\nassistant\n\ntool\nrain\nuser\nSo?\nassistant\nIt"
    ]


def test_a_stream_is_blocks_of_events(
    client: anthropic.Anthropic, tool_server: RunningServer
) -> None:
    say(tool_server, f"<think>Hm.</think>Ok.{CALL}")
    with client.messages.stream(model=MODEL, max_tokens=500, messages=HI, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    thinking, text, use = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Hm.")
    assert (text.type, text.text) == ("text", "Ok.")
    assert (use.type, use.name, use.input) == ("tool_use", "weather", OSLO)
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens > 0
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3


def test_tools_are_called_and_may_be_forced(
    client: anthropic.Anthropic, tool_server: RunningServer
) -> None:
    say(tool_server, CALL)
    answer = ask(client, tools=TOOLS)
    [use] = answer.content
    assert (use.name, use.input, answer.stop_reason) == ("weather", OSLO, "tool_use")
    assert use.id.startswith("toolu_")
    say(tool_server, '[{"name": "weather", "parameters": {"city": "Oslo"}}]')
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        [use] = ask(client, tools=TOOLS, tool_choice=choice).content
        assert use.input == OSLO
        assert tool_server.engine.seen[-1].sampling.grammar is not None


def test_thinking_and_a_schema_are_handed_on(
    client: anthropic.Anthropic, tool_server: RunningServer
) -> None:
    say(tool_server, THOUGHT)
    answer = ask(client, thinking={"type": "enabled", "budget_tokens": 1_024})
    assert [block.type for block in answer.content] == ["thinking", "text"]
    format = {"type": "json_schema", "schema": {"type": "object"}}
    ask(client, output_config={"format": format})
    assert tool_server.engine.seen[-1].sampling.grammar.kind == "json_schema"


def test_stop_sequence_and_length_are_reported(
    client: anthropic.Anthropic, tool_server: RunningServer
) -> None:
    say(tool_server, "one two three")
    answer = ask(client, stop_sequences=[" three"])
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == (
        "one two",
        "stop_sequence",
        " three",
    )
    assert ask(client, max_tokens=3).stop_reason == "max_tokens"


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    count = client.messages.count_tokens(model=MODEL, messages=HI, system="abc", tools=TOOLS)
    assert count.input_tokens == len("?system\nabc?\n?user\nHi?\n?assistant\n")


def test_the_effort_is_a_part_of_the_counted_prompt() -> None:
    body = CountRequest(messages=[], output_config=OutputConfig(effort="low"))
    assert chat_request(body).reasoning_effort == "low"


def test_errors_have_the_form_and_classes_of_the_sdk(
    client: anthropic.Anthropic, tool_server: RunningServer
) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(client, model="other")
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="max_tokens is 0"):
        ask(client, max_tokens=0)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(
        anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]: this model takes no images"
    ):
        ask(client, messages=[{"role": "user", "content": [image]}])
    tool_server.engine.full = True
    with pytest.raises(anthropic.APIStatusError, match="queue is full") as full:
        ask(client)
    assert full.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]


@pytest.mark.parametrize("kind", ["text", "content", "base64", "url", "file"])
def test_a_document_is_refused_by_its_own_type_whatever_its_source_is(
    client: anthropic.Anthropic, kind: str
) -> None:
    document: Any = {"type": "document", "source": {"type": kind, "data": "Rain"}}
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, messages=[{"role": "user", "content": [document]}])
    assert "messages[0].content[0] is of type 'document', which this" in caught.value.message


def test_a_picture_of_another_source_is_told_which_are_allowed(
    client: anthropic.Anthropic,
) -> None:
    image: Any = {"type": "image", "source": {"type": "text", "data": "Rain"}}
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, messages=[{"role": "user", "content": [image]}])
    expected = "messages[0].content[0].source.type is 'text'; base64 and url are allowed"
    assert expected in caught.value.message


def test_an_error_in_a_stream_is_an_event(
    client: anthropic.Anthropic, tool_server: RunningServer
) -> None:
    say(tool_server, "a" * 1_000)
    tool_server.engine.step_s = 0.002

    def fail() -> None:
        tool_server.client.deliveries.end_all("broken")
        tool_server.engine.running.clear()

    def read() -> None:
        with client.messages.stream(model=MODEL, max_tokens=500, messages=HI) as stream:
            for event in stream:
                if event.type == "text":
                    tool_server.call(fail)

    with pytest.raises(anthropic.APIStatusError, match="broken"):
        read()


def test_the_key_may_come_in_either_header() -> None:
    with running(ServerConfig(drain_s=1.0, api_key="secret")) as server:
        body = {"model": MODEL, "max_tokens": 5, "messages": HI}
        for headers, status in [
            ({"x-api-key": "secret"}, 200),
            ({"authorization": "Bearer secret"}, 200),
            ({"x-api-key": "wrong"}, 401),
        ]:
            answer = httpx.post(f"{server.url}/v1/messages", json=body, headers=headers)
            assert answer.status_code == status
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.json()["type"] == "error"


def test_results_of_a_search_are_text(
    client: anthropic.Anthropic, tool_server: RunningServer
) -> None:
    prompts = record_prompts(tool_server, "x")
    result = {
        "type": "search_result",
        "source": "https://example.com/oslo",
        "title": "Weather",
        "content": [{"type": "text", "text": "Rain."}, {"type": "text", "text": "Wind."}],
        "citations": {"enabled": True},
    }
    told = "Weather\nhttps://example.com/oslo\nRain.\nWind."
    ask(client, messages=[{"role": "user", "content": [result]}])
    results = [{"type": "tool_result", "tool_use_id": "t1", "content": [result]}]
    ask(
        client,
        messages=[*HI, {"role": "assistant", "content": "?"}, {"role": "user", "content": results}],
    )
    assert [told in prompt for prompt in prompts] == [True, True]


def test_content_may_be_empty(client: anthropic.Anthropic, tool_server: RunningServer) -> None:
    prompts = record_prompts(tool_server, "x")
    history = [*HI, {"role": "assistant", "content": []}, *HI]
    ask(client, messages=history)
    ask(client, messages=[{"role": "user", "content": []}])
    assert prompts[0] == "user\nHi\nassistant\n\nuser\nHi\nassistant\n"
    assert prompts[1] == "user\n\nassistant\n"


def test_a_stream_of_thinking_ends_with_a_signature(
    client: anthropic.Anthropic, tool_server: RunningServer
) -> None:
    say(tool_server, THOUGHT)
    with client.messages.stream(model=MODEL, max_tokens=500, messages=HI) as stream:
        kinds = [event.delta.type for event in stream if event.type == "content_block_delta"]
        message = stream.get_final_message()
    assert kinds[kinds.index("signature_delta") - 1] == "thinking_delta"
    assert kinds.count("signature_delta") == 1
    [thinking, *_] = message.content
    assert Opener(Limits()).opened(thinking.signature, "") == thinking.thinking

"""The Responses API with the official SDK."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.server.fake import MODEL, RunningServer, eventually, running
from tests.server.scripted import CALL, WEATHER, record_prompts, say
from weft.config.server import ServerConfig
from weft.server.response_store import STORED_S, ResponseStore

TOOLS: list[Any] = [{"type": "function", "name": "weather", "parameters": WEATHER}]


def test_a_response_has_items_and_usage(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    prompts = record_prompts(tool_server, "<think>Hm.</think>Hello")
    answer = tool_sdk.responses.create(
        model=MODEL, input="Hi", instructions="Be kind.", max_output_tokens=99
    )
    assert answer.status == "completed"
    assert answer.id.startswith("resp_")
    assert answer.output_text == "Hello"
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert prompts == ["system\nBe kind.\nuser\nHi\nassistant\n"]
    assert answer.usage.input_tokens_details.cached_tokens > 0
    assert answer.usage.output_tokens_details.reasoning_tokens == 3
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_a_response_goes_on_from_a_previous_one(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    prompts = record_prompts(tool_server, "Hello")
    first = tool_sdk.responses.create(model=MODEL, input="Hi", instructions="not carried on")
    tool_sdk.responses.create(model=MODEL, input="More", previous_response_id=first.id)
    assert prompts[1] == "user\nHi\nassistant\nHello\nuser\nMore\nassistant\n"
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        tool_sdk.responses.create(model=MODEL, input="x", previous_response_id="resp_none")


def test_a_stream_is_typed_events_in_order(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, f"<think>Hm.</think>Ok.{CALL}")
    events = list(tool_sdk.responses.create(model=MODEL, input="Hi", tools=TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    last = events[-1].response
    assert [item.type for item in last.output] == ["reasoning", "message", "function_call"]
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == "Ok."
    )
    arguments = "".join(
        event.delta for event in events if event.type == "response.function_call_arguments.delta"
    )
    assert arguments == last.output[2].arguments == '{"city": "Oslo"}'
    assert (
        kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    )


def test_the_sdk_puts_a_stream_together(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, "Hello")
    with tool_sdk.responses.stream(model=MODEL, input="Hi") as stream:
        assert stream.get_final_response().output_text == "Hello"


def test_calls_and_their_results_are_input(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, CALL)
    first = tool_sdk.responses.create(model=MODEL, input="Hi", tools=TOOLS)
    [call] = first.output
    assert call.name == "weather"
    assert call.arguments == '{"city": "Oslo"}'
    prompts = record_prompts(tool_server, "Rain.")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "wet"}
    tool_sdk.responses.create(
        model=MODEL, input=[result], tools=TOOLS, previous_response_id=first.id
    )
    own: Any = [{"role": "user", "content": "Hi"}, call.model_dump(exclude_none=True), result]
    tool_sdk.responses.create(model=MODEL, input=own, tools=TOOLS)
    assert prompts == ["user\nHi\nassistant\n\ntool\nwet\nassistant\n"] * 2


def test_a_stored_response_is_retrieved_and_deleted(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, "Hello")
    answer = tool_sdk.responses.create(model=MODEL, input="Hi", metadata={"a": "b"})
    found = tool_sdk.responses.retrieve(answer.id)
    assert found.output_text == "Hello"
    assert found.metadata == {"a": "b"}
    tool_sdk.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        tool_sdk.responses.retrieve(answer.id)
    unstored = tool_sdk.responses.create(model=MODEL, input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        tool_sdk.responses.retrieve(unstored.id)


def test_a_background_response_runs_alone(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, "Hello")
    answer = tool_sdk.responses.create(model=MODEL, input="Hi", background=True)
    assert answer.status == "queued"
    assert eventually(lambda: tool_sdk.responses.retrieve(answer.id).status == "completed")
    assert tool_sdk.responses.retrieve(answer.id).output_text == "Hello"


def test_a_background_response_can_be_cancelled(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, "a" * 1_000)
    tool_server.engine.step_s = 0.1
    answer = tool_sdk.responses.create(model=MODEL, input="Hi", background=True)
    assert eventually(lambda: tool_server.engine.running)
    assert tool_sdk.responses.cancel(answer.id).status == "cancelled"
    assert not tool_server.engine.running
    done = tool_sdk.responses.create(model=MODEL, input="Hi", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="only a background response"):
        tool_sdk.responses.cancel(done.id)


def test_length_is_reported_as_incomplete(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    answer = tool_sdk.responses.create(model=MODEL, input="Hi", max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_a_schema_is_handed_to_the_engine(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    format: Any = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    tool_sdk.responses.create(model=MODEL, input="Hi", text={"format": format})
    assert tool_server.engine.seen[0].sampling.grammar.kind == "json_schema"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "telepathy"}]}, "tools[0]"),
        ({"input": [{"type": "telepathy_call"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"background": True, "stream": True}, "background"),
        ({"input": []}, "input"),
    ],
)
def test_unsupported_options_are_refused_by_name(
    tool_sdk: openai.OpenAI, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        tool_sdk.responses.create(**{"model": MODEL, "input": "Hi", **options})
    assert caught.value.param == param


def test_more_items_than_are_allowed_are_refused(tool_server: RunningServer) -> None:
    items = [{"role": "user", "content": "x"}] * 16_385
    body = {"model": MODEL, "input": items}
    answer = httpx.post(f"{tool_server.url}/v1/responses", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input"


def test_the_store_forgets_what_is_old_or_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    store = ResponseStore(lambda: now[0])
    store.put({"id": "a", "text": "x" * 100}, [])
    now[0] = STORED_S - 1
    store.put({"id": "b"}, [])
    assert store.get("a") is not None
    now[0] = STORED_S + 1
    assert store.get("a") is None
    assert store.get("b") is not None
    monkeypatch.setattr("weft.server.response_store.MAX_STORED_BYTES", 300)
    for name in "cde":
        store.put({"id": name, "text": "x" * 100}, [])
    assert [name for name in "abcde" if store.get(name)] == ["d", "e"]
    store.put({"id": "f", "text": "x" * 1_000}, [])
    assert store.get("f") is None


def test_the_input_of_a_stored_response_is_items_with_ids(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, "Hello")
    text = tool_sdk.responses.create(model=MODEL, input="Hi")
    [item] = tool_sdk.responses.input_items.list(text.id)
    assert item.type == "message"
    assert item.role == "user"
    assert item.content[0].type == "input_text"
    assert item.content[0].text == "Hi"
    given: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}], "id": "msg_own"},
        {
            "type": "function_call",
            "call_id": "c",
            "name": "weather",
            "arguments": "{}",
            "id": "msg_own",
        },
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
        {"role": "assistant", "content": "Rain."},
    ]
    answer = tool_sdk.responses.create(model=MODEL, input=given, previous_response_id=text.id)
    items = list(tool_sdk.responses.input_items.list(answer.id, order="asc"))
    assert [one.type for one in items] == [
        "message",
        "function_call",
        "function_call_output",
        "message",
    ]
    assert items[0].id == "msg_own"
    assert len({one.id for one in items}) == 4
    assert items[1].name == "weather"
    assert items[2].output == "rain"
    assert items[3].content[0].type == "output_text"


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 2, 3, 20])
def test_pages_of_input_items_have_each_item_once_in_order(
    tool_sdk: openai.OpenAI, tool_server: RunningServer, order: Any, limit: int
) -> None:
    say(tool_server, "Hello")
    said: list[Any] = [{"role": "user", "content": str(number)} for number in range(7)]
    answer = tool_sdk.responses.create(model=MODEL, input=said)
    pages = list(
        tool_sdk.responses.input_items.list(answer.id, order=order, limit=limit).iter_pages()
    )
    told = [int(item.content[0].text) for page in pages for item in page.data]
    assert told == (list(range(7)) if order == "asc" else list(reversed(range(7))))
    assert [page.has_more for page in pages] == [True] * (len(pages) - 1) + [False]
    assert [(page.first_id, page.last_id) for page in pages] == [
        (page.data[0].id, page.data[-1].id) for page in pages
    ]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "10001"}, "limit"),
        ({"limit": "9" * 5_000}, "limit"),
        ({"limit": "\u0663"}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "msg_none"}, "after"),
    ],
)
def test_pages_that_make_no_sense_are_refused(
    tool_sdk: openai.OpenAI, tool_server: RunningServer, query: dict[str, str], param: str
) -> None:
    say(tool_server, "Hello")
    answer = tool_sdk.responses.create(model=MODEL, input="Hi")
    with pytest.raises(openai.BadRequestError) as caught:
        tool_sdk.responses.input_items.list(answer.id, extra_query=query)
    assert caught.value.param == param


def test_the_input_of_a_response_that_is_not_there_is_not_found(tool_sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        tool_sdk.responses.input_items.list("resp_none")


def test_an_error_of_the_template_names_the_input() -> None:
    template = "{{ raise_exception('turns must alternate') }}"
    with running(ServerConfig(drain_s=1.0, trust_request_chat_template=True)) as server:
        body = {"input": "Hi", "chat_template": template}
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            answer = httpx.post(server.url + path, json=body)
            error = answer.json()["error"]
            assert answer.status_code == 400
            assert error["param"] == "input"
            assert "turns must alternate" in error["message"]


def test_include_takes_the_names_of_the_api_alone(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    record_prompts(tool_server, "Hello")
    known: Any = ["web_search_call.action.sources", "reasoning.encrypted_content"]
    assert tool_sdk.responses.create(model=MODEL, input="Hi", include=known).status == "completed"
    unknown: Any = [*known, "foo"]
    with pytest.raises(openai.BadRequestError) as caught:
        tool_sdk.responses.create(model=MODEL, input="Hi", include=unknown)
    assert caught.value.param == "include[2]"
    assert "include has 'foo'; it may have message.output_text.logprobs, " in str(caught.value)

"""The official SDK against a running server."""

from __future__ import annotations

import openai
import pytest

from tests.server.fake import CONTEXT, MODEL, RunningServer, as_bytes, running
from tests.text.tokens import EOS, IM_END, IM_START
from weft.config.server import ServerConfig

HI = [{"role": "user", "content": "Hi"}]
HELLO = "Hello, wörld! 🎉"
HELLO_LEN = len(HELLO.encode()) + 1  # with the end of sequence


def test_chat_answers_with_text_reason_and_usage(sdk: openai.OpenAI, server: RunningServer) -> None:
    answer = sdk.chat.completions.create(model=MODEL, messages=HI)
    [choice] = answer.choices
    assert choice.message.content == HELLO
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert choice.matched_stop == choice.stop_reason == EOS
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    num_prompt = len(server.engine.seen[0].input_ids) // 4
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.completion_tokens == HELLO_LEN
    assert answer.usage.total_tokens == num_prompt + HELLO_LEN
    assert answer.usage.prompt_tokens_details.cached_tokens == num_prompt // 2


def test_conversation_reaches_the_engine_through_the_template(
    sdk: openai.OpenAI, server: RunningServer
) -> None:
    server.engine.script = lambda ids: ids
    answer = sdk.chat.completions.create(
        model="", messages=HI, extra_body={"skip_special_tokens": False, "return_token_ids": True}
    )
    expected = [
        IM_START,
        *as_bytes("user\nHi"),
        IM_END,
        ord("\n"),
        IM_START,
        *as_bytes("assistant\n"),
    ]
    assert answer.prompt_token_ids == expected
    assert answer.choices[0].token_ids == [*expected, EOS]
    assert (
        answer.choices[0].message.content
        == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_streamed_chat_is_the_same_text(sdk: openai.OpenAI) -> None:
    chunks = list(
        sdk.chat.completions.create(
            model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == HELLO
    assert all("\ufffd" not in text for text in texts)
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == HELLO_LEN
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_several_choices_share_one_prompt_in_the_usage(
    sdk: openai.OpenAI, server: RunningServer
) -> None:
    answer = sdk.chat.completions.create(model=MODEL, messages=HI, n=3, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {HELLO}
    assert [request.sampling.seed for request in server.engine.seen] == [5, 6, 7]
    assert answer.usage.prompt_tokens == len(server.engine.seen[0].input_ids) // 4
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens // 2
    assert answer.usage.completion_tokens == 3 * HELLO_LEN


def test_streamed_choices_each_have_a_beginning_and_an_end(sdk: openai.OpenAI) -> None:
    texts = {0: "", 1: ""}
    roles = []
    reasons = []
    for chunk in sdk.chat.completions.create(model=MODEL, messages=HI, n=2, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles += [choice.index] * (choice.delta.role is not None)
        reasons += [choice.index] * (choice.finish_reason is not None)
    assert texts == {0: HELLO, 1: HELLO}
    assert sorted(roles) == sorted(reasons) == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_have_the_bytes_of_each_token(
    sdk: openai.OpenAI, server: RunningServer, stream: bool
) -> None:
    server.engine.script = lambda ids: as_bytes("aö")
    options = {"model": MODEL, "messages": HI, "logprobs": True, "top_logprobs": 2}
    if stream:
        chunks = list(sdk.chat.completions.create(stream=True, **options))
        parts = [chunk.choices[0].logprobs for chunk in chunks]
        content = [entry for part in parts if part is not None for entry in part.content]
    else:
        content = sdk.chat.completions.create(**options).choices[0].logprobs.content
    assert [entry.bytes for entry in content] == [[0x61], [0xC3], [0xB6], list(b"<eos>")]
    assert content[0].token == "a"
    assert content[0].logprob == -0.5
    assert [top.token for top in content[0].top_logprobs] == ["a", "b"]
    assert content[1].token == "\ufffd"


def test_parameters_arrive_in_both_spellings(sdk: openai.OpenAI, server: RunningServer) -> None:
    sdk.chat.completions.create(
        model=MODEL,
        messages=HI,
        max_tokens=99,
        max_completion_tokens=9,
        temperature=0,
        top_p=0.5,
        frequency_penalty=0.25,
        presence_penalty=-0.5,
        logit_bias={"65": 5},
        stop=["END", "\n\n"],
        user="u" * 1_000,
        extra_body={
            "top_k": 7,
            "min_p": 0.1,
            "min_tokens": 2,
            "repetition_penalty": 1.5,
            "stop_token_ids": [66],
            "ignore_eos": True,
            "no_stop_trim": True,
            "sampling_seed": 11,
            "cache_salt": "salt",
            "priority": 3,
            "request_id": "my-request",
            "skip_special_tokens": None,
            "n": None,
        },
    )
    [request] = server.engine.seen
    params = request.sampling
    assert params.max_new_tokens == 9
    assert params.min_new_tokens == 2
    assert params.seed == 11
    assert params.temperature == 0.0
    assert params.top_p == 0.5
    assert params.top_k == 7
    assert params.min_p == 0.1
    assert params.frequency_penalty == 0.25
    assert params.presence_penalty == -0.5
    assert params.repetition_penalty == 1.5
    assert params.logit_bias == {65: 5.0}
    assert params.stop == ("END", "\n\n")
    assert params.stop_token_ids == (66,)
    assert (params.ignore_eos, params.include_stop, params.skip_special_tokens) == (
        True,
        True,
        True,
    )
    assert request.rid == "my-request"
    assert request.user == "u" * 256
    assert request.priority == 3
    assert request.cache_salt == "salt"


def test_length_limit_is_reported(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model=MODEL, messages=HI, max_tokens=5)
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "length"


def test_without_a_limit_the_context_is_the_limit(
    sdk: openai.OpenAI, server: RunningServer
) -> None:
    sdk.chat.completions.create(model=MODEL, messages=HI)
    [request] = server.engine.seen
    assert request.sampling.max_new_tokens == CONTEXT - len(request.input_ids) // 4


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_over_tokens_is_cut_off(
    sdk: openai.OpenAI, server: RunningServer, stream: bool
) -> None:
    found = sdk.completions.create(
        model=MODEL, prompt="x", max_tokens=50, stop=[", wö"], stream=stream
    )
    if stream:
        choices = [chunk.choices[0] for chunk in found]
        text = "".join(choice.text for choice in choices)
        last = choices[-1]
    else:
        text = found.choices[0].text
        last = found.choices[0]
    assert text == "Hello"
    assert last.finish_reason == "stop"
    assert last.matched_stop == ", wö"
    assert server.engine.aborted == [server.engine.seen[0].id]


def test_final_message_can_be_continued(sdk: openai.OpenAI, server: RunningServer) -> None:
    messages = [*HI, {"role": "assistant", "content": "I am "}]
    answer = sdk.chat.completions.create(
        model=MODEL,
        messages=messages,
        extra_body={"continue_final_message": True, "return_token_ids": True},
    )
    assert answer.prompt_token_ids[-5:] == as_bytes("I am ")


def test_tools_without_a_parser_may_be_shown_but_not_called() -> None:
    config = ServerConfig(drain_s=1.0, tool_call_parser="none")
    with (
        running(config) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        answer = sdk.chat.completions.create(
            model=MODEL, messages=HI, tools=tools, tool_choice="none"
        )
        assert answer.choices[0].message.content == HELLO
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as caught:
            sdk.chat.completions.create(model=MODEL, messages=HI, tools=tools)
        assert caught.value.param == "tools"


@pytest.mark.parametrize("prompt", ["ab", [97, 98], ["ab"], [[97, 98]]])
def test_completion_of_every_form_of_prompt(
    sdk: openai.OpenAI, server: RunningServer, prompt: object
) -> None:
    server.engine.script = lambda ids: ids
    answer = sdk.completions.create(model=MODEL, prompt=prompt, max_tokens=9)
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "ab"
    assert answer.usage.prompt_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
def test_list_of_prompts_gives_choices_in_order(
    sdk: openai.OpenAI, server: RunningServer, stream: bool
) -> None:
    server.engine.script = lambda ids: ids
    found = sdk.completions.create(
        model=MODEL, prompt=["one", "two", "3"], max_tokens=9, n=2, stream=stream
    )
    texts = [""] * 6
    for chunk in found if stream else [found]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["one", "one", "two", "two", "3", "3"]
    if not stream:
        assert found.usage.prompt_tokens == 7
        assert found.usage.completion_tokens == 2 * (7 + 3)


def test_completion_defaults_to_16_tokens(sdk: openai.OpenAI, server: RunningServer) -> None:
    sdk.completions.create(model=MODEL, prompt="x")
    assert server.engine.seen[0].sampling.max_new_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_first(sdk: openai.OpenAI, stream: bool) -> None:
    found = sdk.completions.create(
        model=MODEL, prompt=[97, 98], max_tokens=5, echo=True, stream=stream
    )
    text = "".join(chunk.choices[0].text for chunk in found) if stream else found.choices[0].text
    assert text == "abHello"


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_name_tokens_and_offsets(
    sdk: openai.OpenAI, server: RunningServer, stream: bool
) -> None:
    server.engine.script = lambda ids: as_bytes("aö")
    found = sdk.completions.create(model=MODEL, prompt="x", max_tokens=3, logprobs=2, stream=stream)
    parts = [chunk.choices[0].logprobs for chunk in (found if stream else [found])]
    assert [token for part in parts for token in part.tokens] == ["a", "bytes:\\xc3", "bytes:\\xb6"]
    assert [value for part in parts for value in part.token_logprobs] == [-0.5] * 3
    assert parts[0].top_logprobs[0] == {"a": -0.5, "b": -1.5}
    assert parts[0].text_offset[:2] == [0, 1][: len(parts[0].text_offset)]


def test_models_are_listed(sdk: openai.OpenAI) -> None:
    [model] = sdk.models.list().data
    assert model.id == MODEL
    assert model.max_model_len == CONTEXT
    assert model.owned_by == "weft"
    assert sdk.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("other")


def test_errors_have_the_classes_of_the_sdk(sdk: openai.OpenAI, server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist") as not_found:
        sdk.chat.completions.create(model="gpt-4", messages=HI)
    assert not_found.value.param == "model"
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="temperature is 9") as bad:
        sdk.chat.completions.create(model=MODEL, messages=HI, temperature=9)
    assert bad.value.param == "temperature"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match=r"2,000 tokens") as long:
        sdk.completions.create(model=MODEL, prompt=[1] * 1_999, max_tokens=2)
    assert long.value.param == "max_tokens"
    assert long.value.code == "context_length_exceeded"
    server.engine.full = True
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="queue is full") as full:
            sdk.chat.completions.create(model=MODEL, messages=HI, stream=stream)
        assert full.value.status_code == 503
        assert full.value.response.headers["retry-after"] == "1"


def test_sdk_retries_when_the_queue_is_full(sdk: openai.OpenAI, server: RunningServer) -> None:
    refused = []

    def full_once(ids: list[int]) -> list[int]:
        return as_bytes("ok")

    server.engine.script = full_once
    server.engine.full = True
    original = server.engine.send

    def send(message: object) -> None:
        original(message)  # type: ignore[arg-type]
        refused.append(message)
        server.engine.full = False

    server.engine.send = send  # type: ignore[method-assign]
    answer = sdk.with_options(max_retries=2).chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.content == "ok"
    assert len(refused) == 2

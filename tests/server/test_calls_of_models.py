"""Chat completions of models that write calls as XML (Qwen 3 Coder) and as messages (gpt-oss), with
the official SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.fake import HANG_S, RunningServer, running
from tests.server.scripted import HI, ask, say
from weft.config.options import SettingsError, options_of
from weft.config.server import ServerConfig
from weft.messages.pins import ToolPause
from weft.messages.sampling import ThinkingMarks

FORECAST: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "hourly": {"type": "boolean"},
        "units": {"anyOf": [{"type": "object"}, {"type": "null"}]},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "forecast", "parameters": FORECAST}},
    {"type": "function", "function": {"name": "news"}},
]
GIVEN = {"city": '5th "Avenue"\nOslo', "days": 3, "hourly": False, "units": {"wind": "m/s"}}
XML = (
    "<think>\nIt rains.\n</think>\n\nWell.\n<tool_call>\n<function=forecast>\n<parameter=city>\n"
    '5th "Avenue"\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=hourly>\nFalse\n'
    '</parameter>\n<parameter=units>\n{"wind": "m/s"}\n</parameter>\n</function>\n</tool_call>\n'
    "<tool_call>\n<function=news>\n</function>\n</tool_call>"
)
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
HARMONY = (
    f"{ANALYSIS}It rains.<|end|><|start|>assistant<|channel|>commentary<|message|>Well.\n<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.forecast <|constrain|>json<|message|>"
    f"{json.dumps(GIVEN)}<|call|><|start|>assistant<|channel|>analysis to=functions.news code"
    "<|message|>{}<|call|>"
)
# Names of SGLang and vLLM.
CONFIGS = {
    "qwen": ServerConfig(drain_s=1.0, tool_call_parser="qwen3_xml", reasoning_parser="glm45"),
    "gpt-oss": ServerConfig(drain_s=1.0, tool_call_parser="openai", reasoning_parser="gpt-oss"),
}
SAID = {"qwen": XML, "gpt-oss": HARMONY}


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, RunningServer]]:
    with running(CONFIGS["qwen"]) as qwen, running(CONFIGS["gpt-oss"]) as gpt_oss:
        yield {"qwen": qwen, "gpt-oss": gpt_oss}


@pytest.fixture(params=["qwen", "gpt-oss"])
def family(request: pytest.FixtureRequest, servers: dict[str, RunningServer]) -> str:
    name: str = request.param
    servers[name].reset()
    return name


@pytest.fixture
def sdk(family: str, servers: dict[str, RunningServer]) -> Iterator[openai.OpenAI]:
    url = f"{servers[family].url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=HANG_S) as client:
        yield client


def test_calls_and_reasoning_of_a_whole_answer(
    family: str, servers: dict[str, RunningServer], sdk: openai.OpenAI
) -> None:
    say(servers[family], SAID[family])
    [choice] = ask(sdk, tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well.\n"
    assert choice.message.reasoning_content.strip() == "It rains."
    first, second = choice.message.tool_calls
    assert first.function.name == "forecast"
    assert json.loads(first.function.arguments) == GIVEN
    assert second.function.name == "news"
    assert second.function.arguments == "{}"


def test_calls_and_reasoning_of_a_stream(
    family: str, servers: dict[str, RunningServer], sdk: openai.OpenAI
) -> None:
    say(servers[family], SAID[family])
    servers[family].engine.step_s = 0.0005
    chunks = list(ask(sdk, tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "Well.\n"
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts).strip() == "It rains."
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    names = [(call.index, call.function.name) for call in calls if call.id]
    assert names == [(0, "forecast"), (1, "news")]
    pieces = [call.function.arguments for call in calls if call.index == 0]
    assert len(pieces) > 3
    assert json.loads("".join(pieces)) == GIVEN
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_broken_call_is_content_and_no_error(
    family: str, servers: dict[str, RunningServer], sdk: openai.OpenAI
) -> None:
    broken = {
        "qwen": "<tool_call>\n<function=unknown>\n</function>\n</tool_call>",
        "gpt-oss": "<|channel|>commentary to=functions.forecast<|message|>none<|call|>",
    }[family]
    say(servers[family], broken)
    [choice] = ask(sdk, tools=TOOLS).choices
    assert choice.message.content == broken
    assert choice.finish_reason == "stop"
    streamed = list(ask(sdk, tools=TOOLS, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == broken


def test_an_answer_of_gpt_oss_has_none_of_its_marks(servers: dict[str, RunningServer]) -> None:
    server = servers["gpt-oss"]
    server.reset()
    say(server, f"{ANALYSIS}Hm.<|end|>{FINAL}Yes.<|return|>")
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": HI}).json()
    message = answer["choices"][0]["message"]
    assert message["content"] == "Yes."
    assert message["reasoning_content"] == "Hm."


def test_a_grammar_of_gpt_oss_holds_from_its_final_message_on(
    servers: dict[str, RunningServer],
) -> None:
    server = servers["gpt-oss"]
    server.reset()
    say(server, f'{ANALYSIS}Hm.<|end|>{FINAL}[{{"name": "news", "parameters": {{}}}}]')
    body = {"messages": HI, "tools": TOOLS, "tool_choice": "required"}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "news", "arguments": "{}"}
    [request] = server.engine.seen
    assert request.sampling.grammar is not None
    marks = ThinkingMarks(tuple(ANALYSIS.encode()), tuple(FINAL.encode()), is_open=True)
    assert request.sampling.grammar.behind == marks


def test_calls_in_a_text_get_the_types_of_the_tools(servers: dict[str, RunningServer]) -> None:
    body = {"text": XML, "tools": TOOLS, "tool_call_parser": "qwen3_coder"}
    found = httpx.post(f"{servers['gpt-oss'].url}/parse_function_call", json=body).json()
    assert [json.loads(call["parameters"]) for call in found["calls"]] == [GIVEN, {}]


def test_an_unknown_parser_is_refused_with_those_that_there_are() -> None:
    options = {option.name: option for option in options_of(ServerConfig)}
    assert options["tool_call_parser"].from_text("qwen25", "--tool-call-parser") == "qwen25"
    with pytest.raises(SettingsError, match=r"'kimi_k9'; one of .*gpt_oss.*kimi_k2"):
        options["tool_call_parser"].from_text("kimi_k9", "--tool-call-parser")
    with pytest.raises(SettingsError, match=r"'none9'; one of .*granite.*qwen3"):
        options["reasoning_parser"].from_text("none9", "--reasoning-parser")


def test_a_budget_of_gpt_oss_ends_its_message_of_reasoning(
    servers: dict[str, RunningServer],
) -> None:
    server = servers["gpt-oss"]
    server.reset()
    say(server, f"{FINAL}Yes.")
    body = {"messages": HI, "thinking_budget": 100}
    httpx.post(f"{server.url}/v1/chat/completions", json=body)
    [request] = server.engine.seen
    marks = ThinkingMarks(tuple(ANALYSIS.encode()), tuple(b"<|end|>"), is_open=False)
    assert request.sampling.thinking_marks == marks


def test_a_custom_grammar_holds_calls_in_reasoning_and_its_budget_stays(
    servers: dict[str, RunningServer],
) -> None:
    """Calls of harmony may stand in any message, so the grammar applies from the first token on."""
    server = servers["gpt-oss"]
    server.engine.seen.clear()
    call = (
        f"{ANALYSIS}Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.sum "
        '<|constrain|>json<|message|>{"input": "1+2"}<|call|>'
    )
    say(server, call)
    format = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9+]+"}}
    tool = {"type": "custom", "custom": {"name": "sum", "format": format}}
    body = {"messages": HI, "tools": [tool, *TOOLS], "thinking_budget": 64}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=HANG_S)
    [choice] = reply.json()["choices"]
    assert "X-Weft-Warnings" not in reply.headers
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["tool_calls"][0]["custom"] == {"name": "sum", "input": "1+2"}
    [request] = server.engine.seen
    grammar = request.sampling.grammar
    assert grammar is not None
    assert grammar.kind == "structural_tag"
    assert grammar.behind is None
    assert request.sampling.thinking_budget == 64
    assert isinstance(request.sampling.thinking_marks, ThinkingMarks)


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_hears_which_tools_a_client_will_come_back_from(
    servers: dict[str, RunningServer], stream: bool
) -> None:
    server = servers["qwen"]
    engine = server.engine
    engine.seen.clear()
    engine.paused.clear()
    for said, tools in ((XML, TOOLS), ("No.", TOOLS), (XML, [])):
        say(server, said)
        body = {"messages": HI, "tools": tools, "stream": stream}
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=HANG_S)
    assert [request.may_pause for request in engine.seen] == [True, True, False]
    assert engine.paused == [ToolPause(id=engine.seen[0].id, tools=("forecast", "news"))]

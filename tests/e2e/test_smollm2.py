"""The default model answers sensibly: where its package is installed (scripts/serve fetches it)."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server
from tests.seeds import one_in
from weft import LLM, SamplingParams
from weft.weights import known

pytestmark = pytest.mark.skipif(
    known.SMOLLM2.found() is None, reason=f"{known.SMOLLM2.name} is not installed: scripts/serve"
)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=64)
BEGINNING = 32  # tokens, in which the scattering of light is named
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]
# Of transformers in float32, on the same widened weights and tokens of the license.
PERPLEXITY = 16.2584


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(known.SMOLLM2.name, kv_tokens=2_048, threads=1) as llm:
        yield llm


def test_it_answers_a_question(llm: LLM) -> None:
    assert llm.model.name == "SmolLM2-135M-Instruct"
    [output] = llm.chat(QUESTION, SamplingParams(temperature=0.0, max_new_tokens=BEGINNING))
    assert "scatter" in output.text
    [output] = llm.chat([{"role": "user", "content": "Where is the Eiffel Tower?"}], GREEDY)
    assert "Paris" in output.text
    assert output.finish_reason == "stop"


def test_its_perplexity_is_that_of_transformers(llm: LLM) -> None:
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids = llm.tokenizer.encode(text)[512:1_024]
    params = SamplingParams(max_new_tokens=1, logprobs=0, prompt_logprobs=0)
    [output] = llm.generate([ids], params)
    losses = [-token.logprob for token in output.prompt_logprobs[1:] if token.logprob is not None]
    assert len(losses) == 511
    assert math.exp(sum(losses) / len(losses)) == pytest.approx(PERPLEXITY, rel=0.02)


BASE_END = struct.pack("<I", 0)  # <|endoftext|>
ENDS = {
    "only that of texts": (b"tokenizer.ggml.eos_token_id", BASE_END),
    "none": (b"tokenizer.ggml.eos_token_no", BASE_END),
}


@pytest.mark.parametrize("case", one_in(2, ENDS))
def test_its_answer_ends_whichever_end_its_metadata_name(case: str, tmp_path: Path) -> None:
    found = known.SMOLLM2.found()
    assert found is not None
    path = tmp_path / "model.gguf"
    path.write_bytes(with_end(found.read_bytes(), *ENDS[case]))
    llm = LLM(str(path), kv_tokens=2_048, threads=1)
    [output] = llm.chat([{"role": "user", "content": "Where is the Eiffel Tower?"}], GREEDY)
    assert "Paris" in output.text
    assert "user" not in output.text
    assert output.finish_reason == "stop"


def with_end(content: bytes, key: bytes, value: bytes) -> bytes:
    """The GGUF file with another key and value in place of those of its end token."""
    start = content.index(b"tokenizer.ggml.eos_token_id")
    at_value = start + len(key) + 4  # behind the type
    assert content[at_value : at_value + 4] == struct.pack("<I", 2)
    between = content[start + len(key) : at_value]
    return content[:start] + key + between + value + content[at_value + 4 :]


def test_a_server_without_a_model_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(known.DEFAULT)
    server = Server()
    try:
        answer = server.post(
            "/v1/chat/completions", messages=QUESTION, temperature=0, max_tokens=BEGINNING
        )
        assert answer["model"] == "SmolLM2-135M-Instruct"
        assert "scatter" in answer["choices"][0]["message"]["content"]
        assert_tools_work(server)
    finally:
        assert server.stop() == 0


def assert_tools_work(server: Server) -> None:
    """Its template knows no tools: with `auto` it calls or answers, and no mark is left over."""
    city = {"enum": ["Oslo", "Rome"]}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    messages = [{"role": "user", "content": "How is the weather in Oslo?"}]
    asked = {"messages": messages, "tools": tools, "temperature": 0, "max_tokens": BEGINNING}
    answer = server.post("/v1/chat/completions", tool_choice="required", **asked)
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in city["enum"]
    message = server.post("/v1/chat/completions", **asked)["choices"][0]["message"]
    assert message.get("tool_calls") or message["content"]
    assert "<answer>" not in (message["content"] or "")
    assert "<tool_call>" not in (message["content"] or "")

"""Drafts with the bundled model: exactly the tokens that come without them, whatever is asked
for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import weft
from tests.e2e.draft_proof import compile_first, differences
from tests.server.real_engine import serving
from weft import LLM, Grammar, SamplingParams
from weft.messages.status import Stats
from weft.scheduler.speculation import speculator

NANO = Path(weft.__file__).parent / "bundled" / "weft-nano"
TEXT = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n    return a + b\n\n\n"
PROMPTS = [
    TEXT,
    TEXT + "def sub(a, b):\n",
    "import os\nimport sys\nimport os\nimport sys\n",
    "What does os.path.join do?",
]
RECORDS = """{"type": "array", "minItems": 3, "items": {"type": "object", "required": ["a", "b"],
  "properties": {"a": {"enum": ["def", "return", "import"]}, "b": {"type": "string"}}}}"""
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.2, "top_k": 5, "top_p": 0.9, "seed": 4},
    {"temperature": 0.7, "min_p": 0.05, "frequency_penalty": 0.6, "presence_penalty": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.5, "min_new_tokens": 20, "logit_bias": {11: 2.0}, "seed": 5},
    {"temperature": 0.0, "bad_words": ("return", " a + b")},
    {"temperature": 0.0, "stop": ("return",)},
    {"temperature": 0.0, "grammar": Grammar("regex", "[ab ]{4,12}")},
    {"temperature": 0.7, "grammar": Grammar("json_schema", RECORDS), "seed": 7},
    {"temperature": 0.9, "n": 2, "seed": 6},
]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is worth its cost, however fast this machine is."""
    monkeypatch.setattr(speculator, "least_chance", lambda *_: 0.02)


def answers(
    speculative: str, wishes: list[dict[str, Any]], **settings: Any
) -> tuple[list[Any], Stats]:
    """What each prompt with each wish gives, twice, and the engine's numbers then."""
    llm = LLM(speculative=speculative, threads=1, kv_tokens=4_096, **settings)
    prompts: list[str] = []
    params: list[SamplingParams] = []
    for wish in wishes:
        for prompt in PROMPTS:
            prompts.append(prompt)
            params.append(SamplingParams(max_new_tokens=24, **wish))
    compile_first(llm, [wish["grammar"] for wish in wishes if "grammar" in wish])
    # What was said the first time is in the prefix cache the second time.
    outputs = [*llm.generate(prompts, params), *llm.generate(prompts, params)]
    return outputs, llm._engine.services.stats()  # type: ignore[attr-defined]


def test_drafts_change_no_bit(eager: None) -> None:
    settings = {"max_running_requests": 3, "chunked_prefill_size": 32}
    plain, before = answers("off", WISHES, **settings)
    drafted, stats = answers("tree,ngram", WISHES, **settings)
    assert not differences(plain, drafted, bitwise=True)
    assert stats.total_accepted_tree > 50
    assert stats.total_accepted_ngram > 10
    assert stats.total_steps < before.total_steps
    assert before.total_drafts_tree == before.total_drafts_ngram == 0


def test_drafts_under_a_grammar_are_kept(eager: None) -> None:
    wishes = [wish for wish in WISHES if "grammar" in wish]
    plain, before = answers("off", wishes)
    drafted, stats = answers("tree,ngram", wishes)
    assert [one.token_ids for one in plain] == [one.token_ids for one in drafted]
    assert stats.total_accepted_tree > 20
    assert stats.total_forced_tokens == before.total_forced_tokens > 0


def test_drafts_change_no_token_where_torch_computes(eager: None) -> None:
    settings = {"kernels": "torch", "dtype": "float32", "max_running_requests": 4}
    plain, _ = answers("off", WISHES[:3], **settings)
    drafted, stats = answers("tree,ngram", WISHES[:3], **settings)
    assert [one.token_ids for one in plain] == [one.token_ids for one in drafted]
    assert stats.total_accepted_tree > 10


def test_a_client_says_what_it_expects_and_is_told_how_much_was_right() -> None:
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "What does os.path.join do?"}],
        "max_tokens": 40,
        "temperature": 0,
    }
    with serving(NANO.resolve(), kv_tokens=4096, speculative="prediction") as server:
        plain = server.post("/v1/chat/completions", **body).json()
        text = plain["choices"][0]["message"]["content"]
        prediction = {"type": "content", "content": [{"type": "text", "text": text}]}
        answer = server.post("/v1/chat/completions", **body, prediction=prediction).json()
        assert answer["choices"][0]["message"]["content"] == text
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 20
        assert details["rejected_prediction_tokens"] < 8
        assert "completion_tokens_details" not in plain["usage"]
        metrics = server.get("/metrics").text
        assert "weft:accepted_prediction_total" in metrics
        for wrong in ({"type": "text", "content": "a"}, {"type": "content"}, "text"):
            refused = server.post("/v1/chat/completions", **body, prediction=wrong)
            assert refused.status_code == 400
            assert "prediction" in refused.json()["error"]["message"]

"""Drafts with the bundled model: exactly the tokens that come without them, whatever is asked
for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import weft
from tests.e2e.draft_proof import compile_first, differences
from tests.e2e.draft_requests import PROMPTS, WISHES
from tests.grammar.compiled_here import compiling_here
from tests.server.real_engine import serving
from weft import LLM, SamplingParams
from weft.messages.status import Stats
from weft.scheduler.speculation import speculator

NANO = Path(weft.__file__).parent / "bundled" / "weft-nano"


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is worth its cost, however fast this machine is."""
    monkeypatch.setattr(speculator, "least_chance", lambda *_: 0.02)
    monkeypatch.setattr(speculator, "steps_of_rest", lambda *_: 0)


def answers(
    speculative: str, wishes: list[dict[str, Any]], **settings: Any
) -> tuple[list[Any], Stats]:
    """What half of the prompts with each wish give, twice, and the engine's numbers then."""
    with compiling_here():
        llm = LLM(speculative=speculative, threads=1, kv_tokens=4_096, **settings)
    prompts: list[str] = []
    params: list[SamplingParams] = []
    for number, wish in enumerate(wishes):
        for prompt in PROMPTS[number % 2 :: 2]:
            prompts.append(prompt)
            params.append(SamplingParams(max_new_tokens=24, **wish))
    compile_first(llm, [wish["grammar"] for wish in wishes if "grammar" in wish])
    # What was said the first time is in the prefix cache the second time.
    outputs = [*llm.generate(prompts, params), *llm.generate(prompts, params)]
    return outputs, llm._own.engine.services.stats()  # type: ignore[attr-defined]


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
    plain, _ = answers("off", WISHES[:2], **settings)
    drafted, stats = answers("tree,ngram", WISHES[:2], **settings)
    assert [one.token_ids for one in plain] == [one.token_ids for one in drafted]
    assert stats.total_accepted_tree > 10


def test_a_client_says_what_it_expects_and_is_told_how_much_was_right(eager: None) -> None:
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

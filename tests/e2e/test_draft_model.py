"""The bundled pair: weft-nano with guesses of weft-nano-draft gives exactly its own tokens,
whatever is asked for."""

from __future__ import annotations

import json
import shutil
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.draft_requests import PROMPTS, WISHES
from tests.grammar.compiled_here import compiling_here
from tests.server.real_engine import serving
from weft import LLM, SamplingParams
from weft.config.options import SettingsError
from weft.messages.status import Stats
from weft.weights.known import BUNDLED

PAIR = {"model": "weft-nano", "draft_model": "weft-nano-draft", "threads": 1}


def answers(wishes: list[dict[str, Any]], **settings: Any) -> tuple[list[Any], Stats]:
    """What a prompt with each wish gives, six of them twice, and the engine's numbers then."""
    with compiling_here():
        llm = LLM(**{**PAIR, "kv_tokens": 4_096, **settings})
    prompts: list[str] = []
    params: list[SamplingParams] = []
    for wish, prompt in zip(wishes, cycle(PROMPTS), strict=False):
        prompts.append(prompt)
        params.append(SamplingParams(max_new_tokens=20, **wish))
    outputs = [*llm.generate(prompts, params), *llm.generate(prompts[:6], params[:6])]
    return outputs, llm._own.engine.services.stats()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    """Without any guess."""
    return answers(WISHES, draft_model="", speculative="off")[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_running_requests": 1, "speculative": "draft"},
        {"max_running_requests": 3, "chunked_prefill_size": 32},
        {"kv_tokens": 512, "context_length": 256, "speculative": "draft", "page_size": 4},
    ],
    ids=["alone", "chunks and all sources", "retraction"],
)
def test_a_draft_model_changes_no_bit(plain: list[Any], settings: dict[str, Any]) -> None:
    drafted, stats = answers(WISHES, **settings)
    for one, other in zip(plain, drafted, strict=True):
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        assert one.finish_reason == other.finish_reason
        assert one.logprobs == other.logprobs
    assert stats.total_drafts_draft > 0


def test_a_draft_model_changes_no_token_where_torch_computes() -> None:
    torch = {"kernels": "torch", "dtype": "float32", "max_running_requests": 1}
    plain, _ = answers(WISHES[1:2], draft_model="", speculative="off", **torch)
    drafted, stats = answers(WISHES[1:2], speculative="draft", **torch)
    assert [one.token_ids for one in plain] == [one.token_ids for one in drafted]
    assert stats.total_drafts_draft > 0


def test_guesses_are_drawn_as_the_request_draws() -> None:
    """With itself as its draft model nothing is guessed wrongly, at any temperature."""
    for wish in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 3, "top_p": 0.95}):
        llm = LLM(**{**PAIR, "draft_model": "weft-nano"}, kv_tokens=2_048, speculative="draft")
        llm.generate(PROMPTS, SamplingParams(max_new_tokens=16, **wish))  # type: ignore[arg-type]
        stats = llm._own.engine.services.stats()  # type: ignore[attr-defined]
        assert stats.total_drafts_draft == stats.total_accepted_draft > 8


def test_new_weights_and_memory_that_comes_and_goes_leave_the_answers_right(tmp_path: Path) -> None:
    shutil.copytree(BUNDLED, tmp_path / "same")
    body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0}
    settings = {
        "draft_model": "weft-nano-draft",
        "speculative": "draft",
        "weights_root": str(tmp_path),
    }
    with serving(BUNDLED, kv_tokens=2_048, **settings) as server:

        def text() -> str:
            answer = server.post("/v1/completions", **body)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        first = text()
        released = server.post("/release_memory_occupation")
        assert released.status_code == 200
        assert server.post("/resume_memory_occupation").status_code == 200
        assert text() == first
        folder = str(tmp_path / "same")
        assert server.post("/update_weights_from_disk", model_path=folder).status_code == 200
        assert text() == first
        metrics = server.get("/metrics").text
        assert "weft:drafts_draft_total" in metrics
        assert "weft:accepted_draft_total" in metrics


# ---- refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_model": "", "speculative": "draft"}, "--draft-model names one"),
        ({"speculative": "ngram"}, "--speculative is ngram, which does not use it"),
        ({"speculative": "off"}, "--speculative is off, which does not use it"),
        ({"draft_model": "./nowhere"}, "--draft-model is ./nowhere: there is no folder"),
        ({"split_prefill_layers": 2}, "prefills are split"),
    ],
)
def test_impossible_values_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        LLM(**{**PAIR, **settings})


def test_a_draft_model_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(BUNDLED.with_name("weft-nano-draft"), folder)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    words = content["model"]["vocab"]
    one, other = (word for word, id in words.items() if id in (300, 301))
    words[one], words[other] = words[other], words[one]
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(
        SettingsError, match="its tokenizer differs from the model's: token 300 is "
    ):
        LLM(**{**PAIR, "draft_model": str(folder)})

"""EAGLE-3 heads beside weft-nano: every bit is as without, whatever they guess, and what they guess
is what torch computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.draft_proof import prove
from tests.e2e.head_proof import FAMILIES, family_of, num_drafts, prove_beside
from tests.e2e.random_heads import LLAMA, VOCAB, save_eagle3, speculators
from tests.nano_adapters import NANO
from tests.seeds import every_second
from weft import LLM, SamplingParams
from weft.config.draft_model import runs_as
from weft.config.engine import EngineConfig
from weft.config.gpu import STORED
from weft.config.model import ModelConfig
from weft.config.options import SettingsError
from weft.executor.cpu.fused_step import CpuFusedSteps
from weft.executor.heads.guessing import GuessPasses
from weft.messages.status import Stats

PROMPTS = ["def add(a, b):\n", "import os\n", "What does os.path.join do?"]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_eagle3(tmp_path_factory.mktemp("head"))


def answered(folder: Path | None, **settings: Any) -> tuple[list[Any], Stats]:
    if folder is not None:
        settings = {"draft_model": str(folder), **settings}
    llm = LLM("weft-nano", threads=1, kv_tokens=4_096, **settings)
    params = [
        SamplingParams(max_new_tokens=24, temperature=temperature, seed=5, logprobs=1)
        for temperature in (0.0, 0.8)
        for _ in PROMPTS
    ]
    outputs = llm.generate(PROMPTS * 2, params)
    return outputs, llm._own.engine.services.stats()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    """Without any guess."""
    return answered(None, speculative="off")[0]


def test_random_requests_have_the_same_answers_with_a_head(head: Path) -> None:
    _, with_head = prove(11, 5, ("eagle3",), str(head))
    assert with_head.total_drafts_eagle3 > 20  # where little memory is left, nothing is guessed


@pytest.mark.parametrize("name", every_second(FAMILIES))
def test_random_requests_have_the_same_answers_beside_everything_else(name: str) -> None:
    with family_of(name) as family:
        _, with_head = prove_beside(family, 6, 4)  # with adapters and a cache on disk
    assert num_drafts(with_head) > 10


@pytest.mark.parametrize(
    "config",
    [
        speculators(),
        speculators(norm_before_residual=False, draft_vocab_size=VOCAB),
        {**LLAMA, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}},
    ],
    ids=["speculators", "whole vocabulary", "counted by outputs"],
)
def test_heads_of_other_makers_guess_as_well(
    plain: list[Any], config: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_eagle3(tmp_path / "head", config)
    drafted, stats = answered(folder)
    assert [one.logprobs for one in plain] == [one.logprobs for one in drafted]
    assert stats.total_drafts_eagle3 > 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_one_call_of_the_kernels_guesses_what_torch_guesses(
    head: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    guessed: dict[str, list[list[int]]] = {}
    for kernels, kind in (("auto", CpuFusedSteps), ("torch", GuessPasses)):
        seen: list[list[int]] = []
        usual = kind.guess

        def noted(self: Any, *args: Any, usual: Any = usual, seen: Any = seen) -> Any:
            tokens = usual(self, *args)
            seen.append(tokens.tolist())
            return tokens

        with monkeypatch.context() as patch:
            patch.setattr(kind, "guess", noted)
            patch.setattr("weft.scheduler.speculation.guessing.Guesser._count", lambda *_: 4)
            llm = LLM(
                "weft-nano",
                threads=1,
                kv_tokens=2_048,
                kernels=kernels,
                dtype="float32",
                max_running_requests=1,
                draft_model=str(head),
                speculative="eagle3",
            )
            for prompt in PROMPTS[:2]:
                llm.generate(
                    prompt, SamplingParams(max_new_tokens=12, temperature=temperature, seed=2)
                )
        guessed[kernels] = seen
    assert guessed["auto"] == guessed["torch"]
    assert len(guessed["auto"]) > 12


def test_a_head_beside_a_model_of_codes_has_eight_bits(head: Path) -> None:
    target = ModelConfig.from_folder(NANO)
    own = ModelConfig.of_head(head, target)
    assert own is not None
    beside_codes = EngineConfig(draft_model=str(head), quantize=STORED)
    assert runs_as(beside_codes, own).quantize == "int8"
    assert runs_as(beside_codes, target).quantize == "none"  # a draft model


def test_a_draft_model_runs_by_wefts_code_beside_a_model_that_shall_not() -> None:
    config = EngineConfig(draft_model="weft-nano-draft", model_impl="transformers")
    assert runs_as(config, ModelConfig.from_folder(NANO)).model_impl == "auto"


def test_a_head_is_refused_by_what_does_not_fit(tmp_path: Path) -> None:
    two_layers = save_eagle3(tmp_path / "two", {**LLAMA, "num_hidden_layers": 2})
    narrow = save_eagle3(tmp_path / "narrow", {**LLAMA, "hidden_size": 256})
    far = save_eagle3(tmp_path / "far", {**LLAMA, "eagle_aux_hidden_state_layer_ids": [1, 2, 7]})
    other = save_eagle3(tmp_path / "other", speculators(speculators_model_type="mlp"))
    three = {**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3}
    odd = save_eagle3(tmp_path / "odd", three)
    good = save_eagle3(tmp_path / "good")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"draft_model": str(two_layers)}, "a head of 2 layers"),
        ({"draft_model": str(narrow)}, "hidden states of 256"),
        ({"draft_model": str(far)}, "has 7; the model has 6 layers"),
        ({"draft_model": str(other)}, "speculators_model_type is 'mlp'"),
        ({"draft_model": str(good), "speculative": "draft"}, "no draft model is given"),
        ({"draft_model": str(good), "speculative": "ngram"}, "does not use it"),
        ({"draft_model": str(good), "pp_size": 2}, "in several processes .--pp-size"),
        ({"draft_model": str(odd), "tp_size": 2}, "does not divide the 3 heads"),
        ({"speculative": "eagle3"}, "no eagle3 head is given"),
    ]
    for settings, message in cases:
        with pytest.raises(SettingsError, match=message):
            LLM("weft-nano", threads=1, kv_tokens=512, **settings)


def test_a_list_of_tokens_that_is_none_is_refused(tmp_path: Path) -> None:
    for number, offsets in enumerate([torch.full((512,), VOCAB), torch.zeros(511).long(), None]):
        folder = save_eagle3(tmp_path / str(number), d2t=offsets)
        with pytest.raises(ValueError, match="d2t"):
            LLM("weft-nano", threads=1, kv_tokens=512, draft_model=str(folder))

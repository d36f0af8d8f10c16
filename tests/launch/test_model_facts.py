"""The facts about a model that clients which list models are told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import weft
from weft.assemble.prepare import prepare
from weft.config.engine import EngineConfig
from weft.config.quantized import Quantization
from weft.launch.model_facts import model_facts

NANO = Path(weft.__file__).parent / "bundled" / "weft-nano"


def test_the_bundled_model_has_its_facts() -> None:
    prepared = prepare(EngineConfig(model=str(NANO)))
    facts = model_facts(prepared)
    assert facts.family == "llama"
    assert facts.format == "safetensors"
    assert facts.num_parameters == prepared.model.num_parameters
    assert facts.size_bytes == sum(file.stat().st_size for file in NANO.glob("*.safetensors"))
    assert facts.num_layers == prepared.model.num_layers
    assert facts.quantization == "BF16"


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("Qwen3-0.6B-Q4_K_M.gguf", "Q4_K_M"),
        ("big-UD-IQ2_XXS-00001-of-00002.gguf", "UD-IQ2_XXS"),
        ("model-f16.gguf", "F16"),
        ("model.gguf", "int4 (blocks)"),
    ],
)
def test_the_level_of_a_gguf_is_the_one_of_its_name(tmp_path: Path, name: str, level: str) -> None:
    (tmp_path / name).write_bytes(b"1234")
    numbers = dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"), 1
    )
    model = SimpleNamespace(
        architecture="Qwen2_5_VLForConditionalGeneration",
        stored=Quantization(shown_name="int4 (blocks)"),
        num_parameters=5,
        num_kv_heads=1,
        **numbers,
    )
    prepared: Any = SimpleNamespace(folder=tmp_path, model=model)
    facts = model_facts(prepared)
    assert facts.family == "qwen2_5_vl"
    assert facts.format == "gguf"
    assert facts.size_bytes == 4
    assert facts.quantization == level

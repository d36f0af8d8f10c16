"""Frequencies against those of transformers, with the numbers of real checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.models.many import make_checkpoint
from tests.models.reference import TINY
from tests.models.windowed import Served, assert_greedy
from weft.config.model import ModelConfig
from weft.models.layers.rope import inverse_frequencies

LLAMA_31 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32_768,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4_096,
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        LLAMA_31,
        QWEN_YARN,
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 24.0, "beta_slow": 2.0},
        {**YARN, "attention_factor": 1.2},
    ],
)
def test_frequencies_are_those_of_transformers(rope: dict[str, Any], head_dim: int) -> None:
    theirs = transformers.LlamaConfig(
        **{
            **TINY,
            "head_dim": head_dim,
            "max_position_embeddings": 131_072,
            "rope_parameters": rope,
        }
    )
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, torch.device("cpu"))
    ours = ModelConfig.from_hf({**theirs.to_dict(), "architectures": ["LlamaForCausalLM"]}, "test")
    read = ours.decoder.layer(0).attention.rope
    assert read is not None
    assert torch.allclose(inverse_frequencies(read, head_dim), inv_freq, rtol=1e-6, atol=0)
    assert read.attention_factor == pytest.approx(attention_factor)


@pytest.mark.parametrize(("context_length", "prompt_len"), [(8, 3), (64, 12)])
def test_longrope_is_that_of_the_served_length(
    tmp_path: Path, context_length: int, prompt_len: int
) -> None:
    """The original length is 8: short factors up to it, long ones for all texts beyond it."""
    checkpoint = make_checkpoint("phi3-longrope", tmp_path)
    engine = Served(checkpoint.folder, context_length=context_length, kv_tokens=128)
    prompts = [[5 + 7 * row + place for place in range(prompt_len)] for row in range(3)]
    for sent, id in zip(prompts, engine.run(*prompts, max_new=5), strict=True):
        assert len(engine.outputs[id]) > 1
        assert_greedy(checkpoint, sent, engine.outputs[id])
    engine.runner.close()

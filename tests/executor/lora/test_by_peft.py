"""Adapters that peft itself makes and merges, where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.executor.driver import Turn
from tests.executor.lora.adapters import load, logprobs_with

peft = pytest.importorskip("peft")

# Of transformers about what peft calls, and of peft about embeddings that it saves.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

TOKENS = [(7 * number + 3) % 120 + 5 for number in range(23)]


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def fill_at_random(model: Any, scale: float) -> None:
    """Give an adapter that was just made values of about this size."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3"])
@pytest.mark.parametrize(
    "config",
    [
        {"r": 8, "target_modules": "all-linear"},
        {"r": 64, "target_modules": "all-linear", "use_rslora": True},
        {
            "r": 8,
            "target_modules": ["o_proj", "down_proj"],
            "rank_pattern": {"layers.1.mlp.down_proj": 4, r"layers\.\d\.mlp\.down_proj": 12},
            "alpha_pattern": {"o_proj": 3, "^model.layers.2.self_attn.o_proj": 30},
        },
        {"r": 4, "target_modules": ["o_proj"], "layers_to_transform": [0, 2]},
        {"r": 8, "target_modules": ["embed_tokens", "lm_head", "o_proj"]},
    ],
)
def test_logits_are_those_of_the_model_that_peft_merges(
    base_of, drive, tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    base = base_of(family)
    with_adapter = peft.get_peft_model(plain(base.folder), peft.LoraConfig(lora_alpha=12, **config))
    fill_at_random(with_adapter, 0.1)
    with_adapter.save_pretrained(tmp_path)
    # As it is read: the order of patterns is that of the file, which peft has sorted.
    merged = peft.PeftModel.from_pretrained(plain(base.folder), tmp_path).eval()
    if "lm_head" not in config["target_modules"]:  # where both are one, they would be merged twice
        merged = merged.merge_and_unload().eval()
    with torch.inference_mode():
        expected = merged(torch.tensor([TOKENS])).logits[0, -1].float().log_softmax(-1)
    driver = drive(base, kernels="auto")
    reply = load(driver, base, 0, tmp_path)
    assert reply.ok, reply.message
    found = logprobs_with(driver, [0], Turn(0, TOKENS))[0]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_experts_are_those_that_peft_computes(base_of, drive, tmp_path: Path) -> None:
    base = base_of("qwen2moe")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=12,
        target_modules=["o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={"experts.down_proj": 3},
        alpha_pattern={"experts.gate_up_proj": 5},
    )
    with_adapter = peft.get_peft_model(plain(base.folder), config)
    fill_at_random(with_adapter, 0.2)
    with_adapter.save_pretrained(tmp_path)
    with torch.inference_mode():
        logits = with_adapter.eval()(torch.tensor([TOKENS])).logits
    expected = logits[0, -1].float().log_softmax(-1)
    driver = drive(base, kernels="auto")
    reply = load(driver, base, 0, tmp_path)
    assert reply.ok, reply.message
    found = logprobs_with(driver, [0], Turn(0, TOKENS))[0]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)

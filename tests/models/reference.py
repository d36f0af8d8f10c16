"""Tiny random models of every family, made and saved by transformers."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

VOCAB = 131

TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}

# name -> family in transformers, what differs from TINY
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": LINEAR, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-yarn": ("Llama", {"rope_parameters": YARN, "num_key_value_heads": 6}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16, "num_key_value_heads": 1}),
    "mistral-window": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
}


class Reference(NamedTuple):
    """A saved model, and what transformers says about it."""

    folder: Path
    exact: Any  # the model in float32
    rounded: Any  # and as transformers loads it in bfloat16

    def logprobs(self, tokens: list[int], *, rounded: bool = False) -> torch.Tensor:
        """Log probabilities after each of the tokens: [T, VOCAB]."""
        return _logprobs(self.rounded if rounded else self.exact, tuple(tokens))


@lru_cache(maxsize=64)  # what is asked of one kind of kernels is then asked of the other
@torch.inference_mode()
def _logprobs(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def make_reference(family: str, folder: Path, max_shard_size: str) -> Reference:
    kind, changes = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(
        **{**TINY, **changes}, attn_implementation="eager"
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.25 * noise)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    rounded = type(model).from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    return Reference(folder, model, rounded)

"""Tiny models as GGUF files, and the same as model folders with safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from torch import Tensor

from tests.executor.gguf_files import Stored, paired, plain
from weft.config.model import ModelConfig
from weft.executor.weights.gguf import names
from weft.executor.weights.load import randomize
from weft.models.registry import make_model
from weft.ops.plain import PlainOps

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*ALPHABET, "<|im_start|>", "<|im_end|>", "ab", "abc"]
MERGES = ["a b", "ab c"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "<|im_start|>assistant: "
)
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": np.array([1] * 256 + [3, 3, 1, 1], dtype=np.int32),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 256,
    "tokenizer.ggml.eos_token_id": 257,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": TEMPLATE,
}
SIZES = {
    "block_count": 2,
    "context_length": 256,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5_000.0,
    "rope.dimension_count": 16,
}
CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": len(TOKENS),
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 257,
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def metadata(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """Of a tiny model. A change to None leaves a key out; `attention__scale` is attention.scale."""
    found: dict[str, Any] = {"general.architecture": architecture, **TOKENIZER}
    found |= {f"{architecture}.{key}": value for key, value in SIZES.items()}
    for key, value in changes.items():
        found[f"{architecture}.{key.replace('__', '.')}"] = value
    return {key: value for key, value in found.items() if value is not None}


def hf_weights(architecture: str = "llama", **config: Any) -> dict[str, Tensor]:
    """Random weights, larger than usual: their tokens differ."""
    values = {**CONFIG, "architectures": [CLASSES[architecture]], **config}
    model = make_model(
        ModelConfig.from_hf(values, "tiny"), PlainOps(torch.float32, torch.device("cpu"))
    )
    randomize(model.weights())
    found = {}
    for weight in model.weights():
        scale = 1.0 if "norm" in weight.name else 8.0
        found[weight.name] = weight.get() * scale
    return found


def stored(weights: Mapping[str, Tensor], architecture: str = "llama") -> dict[str, Stored]:
    """The weights as a file has them."""
    found = {}
    for name, tensor in weights.items():
        if architecture == "llama" and ".q_proj." in name:
            tensor = paired(tensor, 4)
        if architecture == "llama" and ".k_proj." in name:
            tensor = paired(tensor, 2)
        found[gguf_name(name)] = plain(tensor)
    return found


def gguf_name(name: str) -> str:
    """The name in a file of a tensor of weft's."""
    base, _, kind = name.rpartition(".")
    for theirs, ours in names._OUTSIDE.items():
        if base == ours:
            return f"{theirs}.{kind}"
    _, _, index, part = base.split(".", 3)
    for theirs, ours in names._OF_A_LAYER.items():
        if part == ours:
            return f"blk.{index}.{theirs}.{kind}"
    raise KeyError(name)


def write_folder(folder: Path, weights: Mapping[str, Tensor], architecture: str = "llama") -> Path:
    """config.json and safetensors, without a tokenizer."""
    folder.mkdir()
    config = {**CONFIG, "architectures": [CLASSES[architecture]]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), folder / "model.safetensors")
    return folder

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
from weft.config.gguf_architectures import ARCHITECTURES
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
CLASSES = {name: architecture.name for name, architecture in ARCHITECTURES.items()}
_FACTORS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.11,
    "logits_scaling": 4.0,
}
_FACTOR_KEYS = {
    "embedding_scale": 3.0,
    "residual_scale": 0.3,
    "attention__scale": 0.11,
    "logit_scale": 4.0,
}
_TIED = {"tie_word_embeddings": True}
_GELU = "gelu_pytorch_tanh"
_RMS = "attention__layer_norm_rms_epsilon"
_LAYER = {_RMS: None, "attention__layer_norm_epsilon": 1e-5}
_GEMMA = {**_TIED, "hidden_activation": _GELU, "query_pre_attn_scalar": 16, "sliding_window": 16}
# architecture -> what a config.json says, and the keys of a file that say the same
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma": ({**_TIED, "hidden_act": _GELU}, {}),
    "gemma2": (
        {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        {
            "attention__sliding_window": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        {
            **_GEMMA,
            "rope_theta": 5_000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 2,
        },
        {
            "attention__sliding_window": 16,
            "attention__sliding_window_pattern": 2,
            "rope__scaling__type": "linear",
            "rope__scaling__factor": 8.0,
        },
    ),
    "granite": ({**_FACTORS, **_TIED}, _FACTOR_KEYS),
    "minicpm": ({**_FACTORS, **_TIED}, _FACTOR_KEYS),
    "smollm3": (_TIED, {}),
    "arcee": ({"hidden_act": "relu2"}, {}),
    "olmo2": ({}, {}),
    "seed_oss": ({"attention_bias": True}, {}),
    "ernie4_5": (_TIED, {}),
    "command-r": (
        {**_TIED, "layer_norm_eps": 1e-5, "logit_scale": 0.25},
        {**_LAYER, "logit_scale": 0.25},
    ),
    "cohere2": (
        {**_TIED, "layer_norm_eps": 1e-5, "logit_scale": 0.25, "sliding_window": 16},
        {**_LAYER, "logit_scale": 0.25, "attention__sliding_window": 16},
    ),
    "starcoder2": ({**_TIED, "norm_epsilon": 1e-5, "hidden_act": _GELU}, _LAYER),
    "stablelm": (
        {"layer_norm_eps": 1e-5, "use_qkv_bias": True, "partial_rotary_factor": 0.25},
        {**_LAYER, "rope__dimension_count": 4},
    ),
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
    has_pairs = ARCHITECTURES[architecture].has_pairs
    for name, tensor in weights.items():
        if has_pairs and ".q_proj." in name:
            tensor = paired(tensor, 4)
        if has_pairs and ".k_proj." in name:
            tensor = paired(tensor, 2)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        found[gguf_name(name, architecture)] = plain(tensor)
    return found


def gguf_name(name: str, architecture: str = "llama") -> str:
    """The name in a file of a tensor of weft's."""
    base, _, kind = name.rpartition(".")
    for theirs, ours in names._OUTSIDE.items():
        if base == ours:
            return f"{theirs}.{kind}"
    _, _, index, part = base.split(".", 3)
    parts = {**names._OF_A_LAYER, **ARCHITECTURES[architecture].parts}
    for theirs, ours in parts.items():
        if part == ours:
            return f"blk.{index}.{theirs}.{kind}"
    raise KeyError(name)


def write_folder(
    folder: Path, weights: Mapping[str, Tensor], architecture: str = "llama", **changes: Any
) -> Path:
    """config.json and safetensors, without a tokenizer."""
    folder.mkdir()
    config = {**CONFIG, "architectures": [CLASSES[architecture]], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), folder / "model.safetensors")
    return folder

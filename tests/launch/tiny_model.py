"""A model folder that passes every check, without a weight worth the name: for tests that never run
the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 258,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 257,
}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def write_tiny_model(folder: Path, **config: Any) -> Path:
    """`config` replaces keys of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE({char: index for index, char in enumerate(alphabet)}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE})
    )
    write_safetensors(folder / "model.safetensors", {"norm.weight": [16]})
    return folder


def write_model_with_experts(folder: Path, **config: Any) -> Path:
    """With weights: six experts in each of two layers, three of them for a token. `config` replaces
    keys of config.json."""
    from weft.config.model import ModelConfig
    from weft.weights.load import save_random

    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
    }
    write_tiny_model(folder, **{**experts, **config})
    save_random(ModelConfig.from_folder(folder), folder / "model.safetensors")
    return folder


def write_uneven_experts(folder: Path) -> Path:
    """Eight experts for two engines, of which those of the first engine are chosen more often."""
    write_model_with_experts(folder, num_experts=8, num_experts_per_tok=2, hidden_size=32)
    favour_first_experts(folder)
    return folder


def favour_first_experts(folder: Path) -> None:
    """Let the experts of `write_model_with_experts` count for the next token, and the second half
    of them be chosen rarely: often for one of several tokens alone."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, weight in tensors.items():
        if "norm" not in name:
            weight *= 10
        if name.endswith("mlp.gate.weight"):
            weight[len(weight) // 2 :] *= 0.3
    save_file(tensors, path, {"format": "pt"})


def write_model_with(layers: str, folder: Path) -> Path:
    """With weights: `windows`, of which every second layer has one of 32 tokens, or `states`, which
    every second layer keeps."""
    from weft.config.model import ModelConfig
    from weft.weights.load import save_random

    kinds = {
        "windows": {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 16,
        },
        "states": {
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "norm_eps": 1e-5,
            "block_auto_adjust_ff_dim": False,
            "conv_bias": False,
            "conv_L_cache": 3,
            "layer_types": ["conv", "full_attention"] * 2,
        },
    }
    write_tiny_model(
        folder,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        **kinds[layers],
    )
    save_random(ModelConfig.from_folder(folder), folder / "model.safetensors")
    return folder


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    """Zeros in float32."""
    header = {}
    end = 0
    for name, shape in shapes.items():
        begin = end
        for size in [*shape, 1]:
            end = begin + (end - begin or 4) * size
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))

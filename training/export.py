"""Writes a trained model as a Hugging Face checkpoint folder: bfloat16 weights, configuration, tokenizer with chat
template. Knows nothing about how the weights came to be.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from training.chat import CHAT_TEMPLATE
from training.model import RMS_NORM_EPS, ROPE_THETA, Shape
from training.tokenizer import END_OF_TEXT, END_OF_TEXT_ID, IM_END, IM_END_ID, SPECIAL_TOKENS


def export(weights: dict[str, Tensor], shape: Shape, tokenizer_file: Path, folder: Path) -> None:
    """Fill `folder` with a checkpoint that `transformers.LlamaForCausalLM` loads; what is there is overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    half = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    (folder / "model.safetensors").write_bytes(save(half, metadata={"format": "pt"}))
    shutil.copyfile(tokenizer_file, folder / "tokenizer.json")
    write_json(folder / "config.json", config(shape))
    write_json(folder / "tokenizer_config.json", tokenizer_config(shape))
    write_json(folder / "generation_config.json", generation_config())


def write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": IM_END_ID,
        "pad_token_id": END_OF_TEXT_ID,
    }


def tokenizer_config(shape: Shape) -> dict[str, Any]:
    literal = dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)
    added = {
        str(i): {"content": token, "special": True, **literal}
        for i, token in enumerate(SPECIAL_TOKENS)
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": shape.max_position,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": added,
        "chat_template": CHAT_TEMPLATE,
    }


def generation_config() -> dict[str, Any]:
    return {
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": [END_OF_TEXT_ID, IM_END_ID],
        "pad_token_id": END_OF_TEXT_ID,
    }

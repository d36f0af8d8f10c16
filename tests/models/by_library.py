"""Tiny random checkpoints, as transformers writes them, that its own code computes: mixtures of
experts, latent attention, learnt positions, what cannot be run on pages. For some families weft has
code, too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import transformers

from tests.models.many import (
    PARTIAL,
    SHAPE,
    VOCAB,
    WINDOWS,
    Checkpoint,
    saved,
)

EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
GEMMA3N = {
    **WINDOWS,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "head_dim": 16,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.0] * 6,
}
SMALL = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128}

# name -> architecture in transformers without "ForCausalLM", what differs from SHAPE
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("Afmoe", {**EXPERTS, **WINDOWS, "head_dim": 16, "num_dense_layers": 1}),
    "apertus": ("Apertus", {}),
    "aria": ("AriaText", {"moe_num_experts": 4, "moe_topk": 2, "intermediate_size": 32}),
    "biogpt": ("BioGpt", {}),
    "bitnet": ("BitNet", {}),
    "cohere2-moe": ("Cohere2Moe", {**EXPERTS, **WINDOWS, "head_dim": 16}),
    "cwm": ("Cwm", {**WINDOWS, "head_dim": 16}),
    "deepseek-v2": ("DeepseekV2", {**ROUTED, **LATENT}),
    "deepseek-v3": ("DeepseekV3", {**ROUTED, **LATENT}),
    "dots1": ("Dots1", {**ROUTED, "head_dim": 16}),
    "ernie4.5-moe": ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, **EXPERTS}),
    "exaone-moe": ("ExaoneMoe", {**EXPERTS, **WINDOWS, "head_dim": 16}),
    "flex-olmo": ("FlexOlmo", EXPERTS),
    "gemma3n": ("Gemma3n", GEMMA3N),
    "glm4-moe": ("Glm4Moe", {**ROUTED, "head_dim": 16}),
    "gpt2": ("GPT2LMHeadModel", SMALL),
    "gpt-bigcode": ("GPTBigCode", {**SMALL, "multi_query": True}),
    "gpt-neox": ("GPTNeoX", {"rope_parameters": PARTIAL}),
    "gpt-oss": ("GptOss", {**LOCAL, **WINDOWS, "head_dim": 16}),
    "granite-moe": ("GraniteMoe", {**LOCAL, "logits_scaling": 4.0, "residual_multiplier": 0.3}),
    "hunyuan-moe": ("HunYuanMoEV1", {"head_dim": 16, "num_experts": 4, "moe_topk": 2}),
    "jetmoe": ("JetMoe", {**LOCAL, "kv_channels": 16, "num_key_value_heads": 2}),
    "minicpm3": ("MiniCPM3", LATENT),
    "minimax-m2": ("MiniMaxM2", {**LOCAL, "head_dim": 16, "rotary_dim": 8}),
    "mixtral": ("Mixtral", {**LOCAL, "sliding_window": 16}),
    "modernbert-decoder": ("ModernBertDecoder", {"local_attention": 16}),
    "nanochat": ("NanoChat", {}),
    "olmo": ("Olmo", {}),
    "olmoe": ("Olmoe", EXPERTS),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "persimmon": ("Persimmon", {"rope_parameters": PARTIAL}),
    "phi": ("Phi", {"rope_parameters": PARTIAL}),
    "phimoe": ("Phimoe", LOCAL),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16}),
    "vaultgemma": ("VaultGemma", {**WINDOWS, "head_dim": 16}),
}

# What cannot be run, and a part of the reason.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "conv"),
    "qwen3.5": ("Qwen3_5", {}, "linear_attention, which keep a state"),
    "minimax": ("MiniMax", LOCAL, "linear_attention"),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}, "takes no positions"),
    "falcon": ("Falcon", {"num_kv_heads": 2}, "attention of its own"),
    "mamba2": (
        "Mamba2",
        {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16},
        "linear_attention, which keep a state",
    ),
    "llama4": ("Llama4", {"layer_types": ["chunked_attention"] * 4, **LOCAL}, "chunked_attention"),
    "bert": ("BertLMHeadModel", {}, "see those after them"),
    "longcat-flash": (
        "LongcatFlash",
        {
            **{"num_layers": 2, "ffn_hidden_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16},
            **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8},
            **{"moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2},
            **{"expert_ffn_hidden_size": 16},
        },
        "computes with weights of its products outside of them",
    ),
}


def class_of(kind: str) -> Any:
    """The class of a family in transformers."""
    if kind.endswith("LMHeadModel"):
        return getattr(transformers, kind)
    return getattr(transformers, f"{kind}ForCausalLM")


def config_of(kind: str, changes: dict[str, Any]) -> Any:
    """The family's configuration in transformers."""
    shape = copy.deepcopy({**SHAPE, **changes})
    config = class_of(kind).config_class(**shape, attn_implementation="eager")
    config.architectures = [class_of(kind).__name__]
    return config


def make_by_library(name: str, folder: Path) -> Checkpoint:
    kind, changes = FAMILIES[name]
    return saved(class_of(kind)(config_of(kind, changes)), folder)

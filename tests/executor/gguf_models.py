"""Tiny models as GGUF files, and the same as model folders with safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from torch import Tensor

from tests.executor.gguf_files import Stored, paired, plain
from weft.assemble.model_folder import model_folder
from weft.config.engine import EngineConfig
from weft.config.families.table import GGUF_FILES
from weft.config.model import ModelConfig
from weft.models.registry import make_model
from weft.ops.plain import PlainOps
from weft.weights.gguf import names
from weft.weights.load import load_weights, randomize, unread_of

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
LATENT = ("deepseek2", "mistral4", "deepseek32", "glm-dsa")
ADDED_ONE = ("gemma", "nemotron", "qwen3next", "qwen35")  # to the weights of norms
AS_THEY_ARE = ("gemma3n", "gemma4", "nemotron_h", "nemotron_h_moe")  # not to these
EXPERT = re.compile(r"(.*\.experts\.)[0-9]+\.(.*)")
WHOLE = {"gptneox": {"attn_qkv": "attention.query_key_value"}}
CLASSES = {name: files.model for name, files in GGUF_FILES.items()}
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
_YARN = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 32,
}
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
    "exaone": ({}, {}),
    "internlm2": ({}, {}),
    "hunyuan-dense": (
        {"rope_scaling": {"type": "dynamic", "alpha": 9.0}},
        {"rope__freq_base": 5_000.0 * 9.0 ** (16 / 14)},
    ),
    "exaone4": (
        {"sliding_window": 16, "sliding_window_pattern": 2},
        {
            "attention__sliding_window": 16,
            "attention__sliding_window_pattern": np.array([1, 0], dtype=np.int32),
        },
    ),
    "mistral3": (
        {
            "architectures": ["Ministral3ForCausalLM"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "llama_4_scaling_beta": 0.3,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        {
            **_YARN,
            "attention__temperature_scale": 0.3,
            "rope__scaling__yarn_log_multiplier": 1.0,
        },
    ),
    "olmo": ({}, {**_LAYER}),
    "nemotron": (
        {"norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
        {**_LAYER, "rope__dimension_count": 8},
    ),
    "phi2": (
        {
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu_new",
            "partial_rotary_factor": 0.5,
        },
        {**_LAYER, "rope__dimension_count": 8},
    ),
    "phi3": (
        {"sliding_window": 16, "partial_rotary_factor": 0.75},
        {"attention__sliding_window": 16, "rope__dimension_count": 12},
    ),
    "gptneox": (
        {
            "layer_norm_eps": 1e-5,
            "num_key_value_heads": 4,
            "hidden_act": "gelu",
            "partial_rotary_factor": 0.5,
            "use_parallel_residual": False,
        },
        {
            **_LAYER,
            "attention__head_count_kv": None,
            "rope__dimension_count": 8,
            "use_parallel_residual": False,
        },
    ),
    "chatglm": ({"partial_rotary_factor": 0.5}, {"rope__dimension_count": 8}),
    "glm4": ({"partial_rotary_factor": 0.5}, {"rope__dimension_count": 8}),
    "stablelm": (
        {"layer_norm_eps": 1e-5, "use_qkv_bias": True, "partial_rotary_factor": 0.25},
        {**_LAYER, "rope__dimension_count": 4},
    ),
}
# The same of those with experts. Llama with experts is Mixtral.
_KEYS = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 32}
_NUMBERS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
_GROUPED_KEYS = {
    **_KEYS,
    "expert_shared_count": 2,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.5,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
}
_WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_WINDOW_KEYS = {
    "attention__sliding_window": 16,
    "attention__sliding_window_pattern": np.array([True, False]),
}
_HEADS = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_HEAD_KEYS = {
    "rope__dimension_count": 8,
    "attention__head_count_kv": 1,
    "attention__q_lora_rank": 24,
    "attention__kv_lora_rank": 32,
    "attention__key_length": 40,
    "attention__value_length": 32,
    "attention__key_length_mla": 24,
    "attention__value_length_mla": 12,
}
_LATENT = {**_GROUPED, **_HEADS, "norm_topk_prob": False}
_LATENT_KEYS = {**_GROUPED_KEYS, **_HEAD_KEYS, "expert_gating_func": 1}
_LATENT_KEYS["expert_weights_norm"] = False
# K and V of all heads are one tensor.
_MINICPM3 = {**_HEADS, "v_head_dim": 16, "hidden_act": "silu"}
_MINICPM3_KEYS = {
    **{"rope__dimension_count": 8, "attention__key_length": 24},
    **{"attention__q_lora_rank": 24, "attention__kv_lora_rank": 32},
}
_INDEXER = {"index_n_heads": 3, "index_head_dim": 16, "index_topk": 8}
_INDEXER_KEYS = {
    "attention__indexer__head_count": 3,
    "attention__indexer__key_length": 16,
    "attention__indexer__top_k": 8,
}
# Multiples of 16 values are chosen from.
_SPARSE = {**_GROUPED, **_HEADS, **_INDEXER, "kv_lora_rank": 24}
_SPARSE_KEYS = {**_GROUPED_KEYS, **_HEAD_KEYS, **_INDEXER_KEYS, "attention__kv_lora_rank": 24}
_SPARSE_KEYS |= {"attention__key_length": 32, "attention__value_length": 24}
_LLAMA4 = {"num_hidden_layers": 4, "intermediate_size_mlp": 96}
_LLAMA4_KEYS = {"block_count": 4, "expert_count": 0}
# Other models of one architecture, by name.
LATENT_VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "V2, in groups, with YaRN": (
        "deepseek2",
        {
            **_LATENT,
            **{"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
            "rope_scaling": {
                **{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
                **{"mscale": 0.707, "mscale_all_dim": 0.707},
            },
        },
        {
            **_LATENT_KEYS,
            **_YARN,
            **{"expert_group_count": 4, "expert_group_used_count": 2},
            "rope__scaling__yarn_log_multiplier": 0.0707,
        },
    ),
    "V3": (
        "deepseek2",
        {
            **{**_GROUPED, **_HEADS, "architectures": ["DeepseekV3ForCausalLM"]},
            **{"n_group": 4, "topk_group": 2},
        },
        {**_GROUPED_KEYS, **_HEAD_KEYS, "expert_group_count": 4, "expert_group_used_count": 2},
    ),
    "V3.2": (
        "deepseek32",
        {**_SPARSE, "n_group": 4, "topk_group": 2},
        {**_SPARSE_KEYS, "expert_group_count": 4, "expert_group_used_count": 2},
    ),
    "GLM-5": ("glm-dsa", _SPARSE, _SPARSE_KEYS),
    "GLM-5, shared": (
        "glm-dsa",
        {**_SPARSE, "index_topk": 48, "indexer_types": ["full", "shared"]},
        {
            **{**_SPARSE_KEYS, "attention__indexer__top_k": 48},
            "attention__indexer__types": np.array([True, False]),
        },
    ),
    "Youtu": (
        "deepseek2",
        {**_HEADS, "architectures": ["YoutuForCausalLM"], "q_lora_rank": None},
        {**_HEAD_KEYS, "attention__q_lora_rank": None, "leading_dense_block_count": 2},
    ),
    "MiniCPM 3": ("minicpm3", _MINICPM3, _MINICPM3_KEYS),
    "MobileLLM R1": (
        "llama4",
        {
            **{**_LLAMA4, **_TIED, "num_local_experts": 0, "no_rope_layers": [1] * 4},
            **{"layer_types": ["full_attention"] * 4, "attn_temperature_tuning": False},
        },
        {**_LLAMA4_KEYS, "interleave_moe_layer_step": 0, "attention__sliding_window": 0},
    ),
    "Maverick": (
        "llama4",
        {
            **{**_LLAMA4, "num_local_experts": 128, "interleave_moe_layer_step": 4},
            **{"intermediate_size": 16, "use_qk_norm": False},
        },
        {
            **{**_LLAMA4_KEYS, "expert_count": 128, "expert_used_count": 1},
            **{"expert_feed_forward_length": 16, "interleave_moe_layer_step": 4},
        },
    ),
    "Mistral 4": (
        "mistral4",
        {
            **{**_LATENT, "norm_topk_prob": True},
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 5_000.0, "factor": 4.0},
                **{"original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.3},
            },
        },
        {
            **{**_LATENT_KEYS, **_YARN, "expert_weights_norm": True},
            "attention__temperature_scale": 0.3,
        },
    ),
}
EXPERT_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (
        {
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
        },
        {"expert_count": 8, "expert_used_count": 3},
    ),
    "qwen2moe": (
        {**_NUMBERS, "shared_expert_intermediate_size": 80, "norm_topk_prob": False},
        {**_KEYS, "expert_shared_feed_forward_length": 80},
    ),
    "qwen3moe": ({**_NUMBERS, "norm_topk_prob": True}, _KEYS),
    "olmoe": ({**_NUMBERS, "norm_topk_prob": False}, {**_KEYS, "expert_feed_forward_length": 96}),
    "gpt-oss": (
        {
            **_NUMBERS,
            "sliding_window": 16,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "truncate": False,
            },
        },
        {**_KEYS, **_YARN, "expert_feed_forward_length": 96, "attention__sliding_window": 16},
    ),
    "llama4": (
        {
            **{**_LLAMA4, "num_local_experts": 8, "interleave_moe_layer_step": 2},
            "intermediate_size": 32,
        },
        {
            **{**_LLAMA4_KEYS, **_KEYS, "expert_used_count": 1, "interleave_moe_layer_step": 2},
            "rope__scaling__type": "none",
        },
    ),
    "granitemoe": (
        {**_NUMBERS, **_FACTORS, "num_local_experts": 8, "gates_and_ups_are_apart": True},
        {**_FACTOR_KEYS, "expert_count": 8, "expert_used_count": 3},
    ),
    "glm4moe": (
        {**_GROUPED, "use_qk_norm": True, "partial_rotary_factor": 0.5},
        {**_GROUPED_KEYS, "rope__dimension_count": 8},
    ),
    "dots1": (_GROUPED, _GROUPED_KEYS),
    "minimax-m2": (
        {"num_local_experts": 8, "num_experts_per_tok": 3, "partial_rotary_factor": 0.5},
        {
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_gating_func": 2,
            "rope__dimension_count": 8,
        },
    ),
    "deepseek2": (_LATENT, _LATENT_KEYS),
    "mistral4": (
        {**_LATENT, "architectures": ["Mistral4ForCausalLM"], "norm_topk_prob": True},
        {**_LATENT_KEYS, "expert_weights_norm": True},
    ),
    "exaone-moe": (
        {**_NUMBERS, **_GROUPED, "num_shared_experts": 2, **_WINDOW},
        {**_GROUPED_KEYS, **_WINDOW_KEYS},
    ),
    "ernie4_5-moe": (
        {
            **_TIED,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
        {
            **_KEYS,
            "expert_shared_count": 2,
            "leading_dense_block_count": 1,
            "interleave_moe_layer_step": 1,
        },
    ),
}
# The same of those with layers that keep a state. The first attention is in the second layer.
_KV_HEADS = np.array([0, 2, 0], dtype=np.int32)
_LFM2 = {
    **_TIED,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_hidden_layers": 3,
}
_LFM2_KEYS = {
    "block_count": 3,
    "attention__head_count_kv": _KV_HEADS,
    "shortconv__l_cache": 3,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}
_DELTA_KEYS = {
    "block_count": 3,
    "ssm__group_count": 2,
    "ssm__time_step_rank": 4,
    "ssm__state_size": 16,
    "ssm__inner_size": 128,
    "ssm__conv_kernel": 4,
    "rope__dimension_count": 8,
    "rope__dimension_sections": np.array([2, 1, 1, 0], dtype=np.int32),
    "full_attention_interval": 2,
    "attention__key_length": 16,
    "attention__value_length": 16,
}
_SHARED = {**_NUMBERS, "shared_expert_intermediate_size": 80}
_SHARED_KEYS = {**_KEYS, "expert_shared_feed_forward_length": 80}
_GRANITE4 = {
    **_FACTORS,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "shared_intermediate_size": 80,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_hidden_layers": 3,
    "gates_and_ups_are_apart": True,
}
_GRANITE4_KEYS = {
    **_FACTOR_KEYS,
    "block_count": 3,
    "attention__head_count_kv": _KV_HEADS,
    "ssm__time_step_rank": 8,
    "ssm__group_count": 2,
    "ssm__state_size": 32,
    "ssm__inner_size": 128,
    "ssm__conv_kernel": 4,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_shared_feed_forward_length": 80,
    "rope__scaling__finetuned": False,
}
GRANITE_SHARED = (
    {
        **_NUMBERS,
        **_FACTORS,
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "num_local_experts": 8,
        "shared_intermediate_size": 80,
        "gates_and_ups_are_apart": True,
    },
    {
        **_FACTOR_KEYS,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_shared_feed_forward_length": 80,
    },
)
# Without experts; the file says the size of what tokens share twice.
GRANITE4_DENSE = (
    {**_GRANITE4, "num_local_experts": 0, "num_experts_per_tok": 0},
    {**_GRANITE4_KEYS, "expert_count": None, "expert_used_count": None, "feed_forward_length": 80},
)
_MAMBA_KEYS = {
    "ssm__time_step_rank": 8,
    "ssm__group_count": 2,
    "ssm__state_size": 32,
    "ssm__inner_size": 128,
    "ssm__conv_kernel": 4,
}
_FALCON_H1 = {
    "mamba_d_ssm": 128,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
}
_MAMBA2 = {
    "num_heads": 8,
    "head_dim": 16,
    "n_groups": 2,
    "state_size": 32,
    "layer_norm_epsilon": 1e-5,
}
_NEMOTRON_H = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
    "layer_norm_epsilon": 1e-5,
    "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
}
_NEMOTRON_H_KEYS = {
    **_MAMBA_KEYS,
    "block_count": 4,
    "attention__head_count_kv": np.array([0, 2, 0, 0], dtype=np.int32),
    "feed_forward_length": np.array([0, 0, 0, 96], dtype=np.int32),
    "attention__key_length": 16,
    "attention__value_length": 16,
    "rope__scaling__finetuned": False,
}
_NEMOTRON_H_MOE = {
    **_NEMOTRON_H,
    "layers_block_type": ["mamba", "attention", "mamba", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 80,
    "routed_scaling_factor": 1.5,
}
_NEMOTRON_H_MOE_KEYS = {
    **_NEMOTRON_H_KEYS,
    "feed_forward_length": np.array([0, 0, 0, 32], dtype=np.int32),
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 80,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
    "expert_group_count": 1,
}
_MAMBA1 = {
    "intermediate_size": 128,
    "state_size": 16,
    "time_step_rank": 4,
    "layer_norm_epsilon": 1e-5,
    "mixer_rms_eps": 1e-5,
}
_MAMBA1_KEYS = {
    "ssm__time_step_rank": 4,
    "ssm__state_size": 16,
    "ssm__inner_size": 128,
    "ssm__conv_kernel": 4,
    "ssm__dt_b_c_rms": True,
}
_NO_PARTS = {"attention__head_count": 0, "attention__head_count_kv": None, "feed_forward_length": 0}
_MINIMAX = {
    **{f"{part}_alpha_factor": 3.5 for part in ("full_attn", "linear_attn", "mlp")},
    **{"num_local_experts": 8, "num_experts_per_tok": 3, "partial_rotary_factor": 0.5},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}
_MINIMAX_KEYS = {
    **{"block_count": 3, "expert_count": 8, "expert_used_count": 3, "residual_scale": 3.5},
    **{"rope__dimension_count": 8, "attention__key_length": 16, "attention__value_length": 16},
}
STATE_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "minimax-01": (_MINIMAX, _MINIMAX_KEYS),
    "falcon-h1": (_FALCON_H1, _MAMBA_KEYS),
    "mamba2": (_MAMBA2, {**_MAMBA_KEYS, **_NO_PARTS, "rope__dimension_count": None}),
    "nemotron_h": (_NEMOTRON_H, _NEMOTRON_H_KEYS),
    "nemotron_h_moe": (_NEMOTRON_H_MOE, _NEMOTRON_H_MOE_KEYS),
    "mamba": (_MAMBA1, {**_MAMBA1_KEYS, **_NO_PARTS, "rope__dimension_count": None}),
    "lfm2": (_LFM2, _LFM2_KEYS),
    "lfm2moe": (
        {**_LFM2, **_NUMBERS, "num_dense_layers": 1, "norm_topk_prob": True},
        {**_LFM2_KEYS, **_KEYS, "leading_dense_block_count": 1, "expert_gating_func": 2},
    ),
    "granitehybrid": (_GRANITE4, _GRANITE4_KEYS),
    "qwen35": (_DELTA, _DELTA_KEYS),
    "qwen35moe": (
        {**_DELTA, **_SHARED},
        {**_DELTA_KEYS, **_SHARED_KEYS, "feed_forward_length": None},
    ),
    "qwen3next": ({**_DELTA, **_SHARED, "norm_topk_prob": True}, {**_DELTA_KEYS, **_SHARED_KEYS}),
}
# Value heads stand in these along this dimension, behind so many values of keys.
TILED = {
    "in_proj_qkv.weight": (0, 64),
    "in_proj_z.weight": (0, 0),
    "in_proj_a.weight": (0, 0),
    "in_proj_b.weight": (0, 0),
    "dt_bias": (0, 0),
    "A_log": (0, 0),
    "conv1d.weight": (0, 64),
    "out_proj.weight": (1, 0),
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
    return {name: plain(tensor) for name, tensor in tensors_of(weights, architecture).items()}


def tensors_of(weights: Mapping[str, Tensor], architecture: str = "llama") -> dict[str, Tensor]:
    """The tensors of a file, under its names: those of all experts as one."""
    found: dict[str, Tensor] = {}
    of_experts: dict[str, list[Tensor]] = {}
    has_pairs = GGUF_FILES[architecture].architecture.has_pairs
    for name, tensor in weights.items():
        if has_pairs and ".q_proj." in name:
            tensor = paired(tensor, 4)
        if has_pairs and ".k_proj." in name:
            tensor = paired(tensor, 2)
        has_added_one = architecture.startswith(ADDED_ONE) and architecture not in AS_THEY_ARE
        if has_added_one and name.endswith("norm.weight"):
            tensor = tensor + ("linear_attn" not in name)
        if architecture.startswith("qwen35") and "linear_attn" in name:
            tensor = tiled(name, tensor)
        if name.endswith("A_log"):
            tensor = -tensor.exp()
        if name.endswith(("conv.conv.weight", "conv1d.weight")):
            tensor = tensor[:, 0]
        of_heads = ("mamba.A_log", "mamba.D", "mixer.A_log", "mixer.D")
        if architecture != "mamba" and name.endswith(of_heads):
            tensor = tensor[:, None]
        if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            tensor = tensor.view(2, -1)
        if architecture == "qwen3next" and "in_proj_qkvz" in name:
            found |= apart(name, tensor)
            continue
        if architecture in LATENT and name.endswith("kv_b_proj.weight"):
            found |= keys_and_values(name, tensor)
            continue
        if ".query_key_value." in name:
            tensor = tensor.unflatten(0, (4, 3, -1)).transpose(0, 1).flatten(0, 2)
        match = EXPERT.fullmatch(name)
        if match is None:
            theirs = gguf_name(name, architecture)
            has_row = theirs.split(".", 2)[-1] in GGUF_FILES[architecture].architecture.rows
            found[theirs] = tensor[0] if has_row else tensor
            continue
        before, rest = match.groups()
        for part, values in _gates_and_ups(rest, tensor, architecture):
            of_experts.setdefault(gguf_name(before + part, architecture), []).append(values)
    return found | {name: torch.stack(each) for name, each in of_experts.items()}


def tiled(name: str, tensor: Tensor) -> Tensor:
    """With the first of the two value heads of each key head before the second."""
    for ending, (dim, num_keys) in TILED.items():
        if name.endswith(ending):
            keys, values = tensor.split([num_keys, tensor.shape[dim] - num_keys], dim)
            values = values.unflatten(dim, (2, 2, -1)).transpose(dim, dim + 1)
            return torch.cat((keys, values.flatten(dim, dim + 2)), dim)
    return tensor


def keys_and_values(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """K^T [heads, rank, plain] and V [heads, value, rank]."""
    keys, values = tensor.unflatten(0, (4, -1)).split([16, 12], 1)
    block = f"blk.{name.split('.')[2]}"
    return {
        f"{block}.attn_k_b.weight": keys.transpose(1, 2).contiguous(),
        f"{block}.attn_v_b.weight": values.contiguous(),
    }


def apart(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The queries, keys and values of all key heads, and the gates, as two tensors."""
    q, k, v, z = tensor.unflatten(0, (2, -1)).split([16, 16, 64, 64], 1)
    block = name.split(".")[2]
    qkv = torch.cat([part.flatten(0, 1) for part in (q, k, v)])
    return {
        f"blk.{block}.attn_qkv.weight": qkv,
        f"blk.{block}.attn_gate.weight": z.flatten(0, 1),
    }


def _gates_and_ups(name: str, tensor: Tensor, architecture: str) -> list[tuple[str, Tensor]]:
    """A tensor of an expert; gates and ups in one as two. Those of gpt-oss alternate."""
    if not name.startswith("gate_up_proj"):
        return [(name, tensor)]
    kind = "bias" if name.endswith("bias") else "weight"
    if architecture == "llama4":
        gates, ups = tensor.chunk(2)
        return [(f"gate_proj.{kind}", gates), (f"up_proj.{kind}", ups)]
    return [(f"gate_proj.{kind}", tensor[0::2]), (f"up_proj.{kind}", tensor[1::2])]


def gguf_name(name: str, architecture: str = "llama") -> str:
    """The name in a file of a tensor of weft's."""
    of = GGUF_FILES[architecture].architecture
    base, _, kind = name.rpartition(".")
    for theirs, ours in {**names._OUTSIDE, **of.outside}.items():
        if base == ours:
            return f"{theirs}.{kind}"
    index, _, part = name.removeprefix(f"{of.layers}.").partition(".")
    parts = {**names._OF_A_LAYER, **of.parts, **WHOLE.get(architecture, {})}
    of_states = {} if of.states is None else of.states.parts
    for theirs, ours in (*parts.items(), *of_states.items()):
        if part == ours:
            return f"blk.{index}.{theirs}"
        if part == f"{ours}.{kind}":
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


def described(path: Path, **settings: Any) -> Path:
    """The model folder of a file."""
    return model_folder(EngineConfig(model=str(path), **settings))


def loaded(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder in float32, as the plain twin keeps them."""
    config = ModelConfig.from_folder(folder)
    model = make_model(config, PlainOps(torch.float32, torch.device("cpu")))
    load_weights(model.weights(), folder, unread_of(config))
    return {weight.name: weight.get() for weight in model.weights()}

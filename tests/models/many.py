"""Tiny random checkpoints of the families beyond `reference.py`, as transformers writes them: four
layers, and windows of 16 tokens where the family has windows."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Takes seconds: here once for all processes of a run.
import transformers.modeling_utils
from safetensors.torch import load_file, save_file

VOCAB = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
WINDOWS = {"sliding_window": 16, "layer_types": TYPES}
# The lists for long contexts are meant for all that is longer than the original.
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 8,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1_000.0, "factor": 8.0}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
PARTIAL = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
GROWING = {**YARN, "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}
FACTORS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.11,
}
GRANITE4 = {
    **FACTORS,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 96,
    "layer_types": ["full_attention"] * 4,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 3}
# Those of DeepSeek V3: 8 experts in groups of 2, of which half are looked at.
GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
ERNIE_EXPERTS = {
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_intermediate_size": 32,
    "moe_num_shared_experts": 2,
}
MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 2, 2]}
MROPE_PARTIAL = {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

LLAMA4: dict[str, Any] = {
    "head_dim": 16,
    "intermediate_size_mlp": 80,
    "num_local_experts": 8,
    "attention_chunk_size": 16,
    "floor_scale": 12,
    "attn_scale": 0.3,
}
# name -> architecture in transformers without "ForCausalLM", what differs from SHAPE
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4": ("Llama4", {**LLAMA4, "interleave_moe_layer_step": 2}),
    "llama4-plain": ("Llama4", {**LLAMA4, "use_qk_norm": False, "no_rope_layers": [1] * 4}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1, 1]}),
    "smollm3-window": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": 16},
    ),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "head_dim": 32,
            "rope_parameters": {**PLAIN, "rope_type": "dynamic", "alpha": 9.0, "factor": 1.0},
        },
    ),
    "hunyuan-bias": ("HunYuanDenseV1", {"attention_bias": True, "head_dim": 16}),
    "phi3": ("Phi3", {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.75}}),
    "phi3-window": ("Phi3", {"sliding_window": 16}),
    "phi3-longrope": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 8}),
    "granite": ("Granite", {**FACTORS, "tie_word_embeddings": True}),
    "granite4": ("GraniteMoeHybrid", {**GRANITE4, "position_embedding_type": "rope"}),
    "granite4-nope": ("GraniteMoeHybrid", GRANITE4),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {**WINDOWS, "rope_parameters": {"sliding_attention": PLAIN, "full_attention": YARN}},
    ),
    "gemma": ("Gemma", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2",
        {
            **WINDOWS,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            **WINDOWS,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {"sliding_attention": PLAIN, "full_attention": LINEAR},
        },
    ),
    "vaultgemma": (
        "VaultGemma",
        {**WINDOWS, "head_dim": 32, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 0.5},
    ),
    "cwm": ("Cwm", {**WINDOWS, "head_dim": 16, "rope_parameters": PLAIN}),
    "phi": ("Phi", {"rope_parameters": {**PARTIAL, "partial_rotary_factor": 0.4}}),
    "gpt-neox": ("GPTNeoX", {"num_key_value_heads": None, "rope_parameters": PARTIAL}),
    "gpt-neox-one-behind-the-other": (
        "GPTNeoX",
        {"num_key_value_heads": None, "use_parallel_residual": False},
    ),
    "olmo": ("Olmo", {}),
    "hyperclovax": ("HyperCLOVAX", FACTORS),
    "hyperclovax-pre": ("HyperCLOVAX", {"use_post_norm": False}),
    "glm": ("Glm", {"head_dim": 16, "rope_parameters": PARTIAL}),
    "glm4": ("Glm4", {"head_dim": 16, "rope_parameters": PARTIAL}),
    "exaone4": ("Exaone4", {**WINDOWS, "sliding_window_pattern": 2}),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere2": ("Cohere2", {**WINDOWS, "logit_scale": 0.25}),
    "ministral": ("Ministral", {**WINDOWS, "head_dim": 32}),
    "ministral3": ("Ministral3", {"head_dim": 32, "rope_parameters": GROWING}),
    "starcoder2": ("Starcoder2", {"sliding_window": 16}),
    "seed-oss": ("SeedOss", {"head_dim": 32}),
    "ernie4.5": ("Ernie4_5", {"head_dim": 32}),
    "helium": ("Helium", {"head_dim": 16}),
    "arcee": ("Arcee", {"mlp_bias": True}),
    "nemotron": ("Nemotron", {"head_dim": 16, "rope_parameters": PARTIAL}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "rope_parameters": PARTIAL}),
    "stablelm-parallel": (
        "StableLm",
        {
            "use_parallel_residual": True,
            "rope_parameters": {**PARTIAL, "partial_rotary_factor": 0.25},
        },
    ),
}
EXPERT_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral-window": ("Mixtral", {**MIXTRAL, "sliding_window": 16}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 80}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-sparse": (
        "Qwen3Moe",
        {**EXPERTS, "head_dim": 16, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
    "olmoe": ("Olmoe", EXPERTS),
    "granite-moe": ("GraniteMoe", {**FACTORS, **MIXTRAL}),
    "granite-shared": (
        "GraniteMoeShared",
        {**FACTORS, **MIXTRAL, "intermediate_size": 32, "shared_intermediate_size": 96},
    ),
    "glm4-moe": ("Glm4Moe", {**GROUPED, "rope_parameters": PARTIAL, "use_qk_norm": True}),
    "ernie4.5-moe": ("Ernie4_5_Moe", ERNIE_EXPERTS),
    "gpt-oss": (
        "GptOss",
        {**MIXTRAL, **WINDOWS, "head_dim": 16, "rope_parameters": {**YARN, "truncate": False}},
    ),
    "minimax-m2": ("MiniMaxM2", {**MIXTRAL, "head_dim": 16, "rope_parameters": PARTIAL}),
    "mellum": (
        "Mellum",
        {
            **EXPERTS,
            **WINDOWS,
            "head_dim": 16,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "rope_parameters": {"sliding_attention": PLAIN, "full_attention": YARN},
        },
    ),
    "solar-open": ("SolarOpen", {**GROUPED, "head_dim": 16, "rope_parameters": YARN}),
    "exaone-moe": (
        "ExaoneMoe",
        {**GROUPED, **EXPERTS, **WINDOWS, "num_shared_experts": 2, "sliding_window_pattern": 2},
    ),
    "dots1": ("Dots1", {**GROUPED, "sliding_window": 16, "layer_types": TYPES}),
}
FAMILIES |= EXPERT_FAMILIES
# Six heads: their slopes are those of eight and of four.
ALIBI = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6}
EVEN = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}
MPT = {**ALIBI, "max_seq_len": 128}
FALCON = {"ffn_hidden_size": 96, "rope_parameters": PLAIN}
FAMILIES |= {
    "bloom": ("Bloom", ALIBI),
    "bloom-even": ("Bloom", {**ALIBI, **EVEN}),
    "mpt": ("Mpt", {**MPT, "attn_config": {"softmax_scale": 0.3}}),
    "falcon": ("Falcon", FALCON),
    "falcon-new": ("Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-rw": (
        "Falcon",
        {**FALCON, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
}
LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
INDEXED = {"q_lora_rank": 32, "index_topk": 32, "index_n_heads": 12, "index_head_dim": 16}
MSCALED = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}
LATENT_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2-lite": (
        "DeepseekV2",
        {
            **GROUPED,
            **LATENT,
            "n_group": None,
            "topk_group": None,
            "norm_topk_prob": False,
            "rope_parameters": MSCALED,
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **GROUPED,
            **LATENT,
            "q_lora_rank": 32,
            "norm_topk_prob": False,
            "topk_method": "group_limited_greedy",
            "attention_bias": True,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {**GROUPED, **LATENT, "q_lora_rank": 32, "rope_parameters": {**MSCALED, "mscale": 1.3}},
    ),
    "glm4-moe-lite": ("Glm4MoeLite", {**GROUPED, **LATENT, "q_lora_rank": 32}),
    "mistral4": ("Mistral4", {**GROUPED, **LATENT, "q_lora_rank": 32, "rope_parameters": GROWING}),
    "deepseek-v3.2": ("DeepseekV32", {**GROUPED, **LATENT, **INDEXED, "rope_parameters": MSCALED}),
    "glm5": ("GlmMoeDsa", {**GROUPED, **LATENT, **INDEXED}),
    # Layers that attend to what an earlier one has chosen, in contexts in which that is all.
    "glm5-shared": (
        "GlmMoeDsa",
        {**GROUPED, **LATENT, **INDEXED, "index_topk": 128, "index_topk_pattern": "FSFS"},
    ),
    # With a token of padding, transformers empties its row whenever it reads a checkpoint.
    "youtu": ("Youtu", {**LATENT, "rope_interleave": False, "pad_token_id": None}),
    "minicpm3": (
        "MiniCPM3",
        {
            **LATENT,
            "q_lora_rank": 32,
            "v_head_dim": None,
            "scale_emb": 3.0,
            "scale_depth": 0.6,
            "dim_model_base": 16,
        },
    ),
}
FAMILIES |= LATENT_FAMILIES
# Layers that keep a state; of those of the delta rule, two value heads share a key head.
DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25},
}
CONVS = {"layer_types": ["conv", "conv", "full_attention", "conv"], "rope_parameters": PLAIN}
GRANITE4_MAMBA = {
    **GRANITE4,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
}
FALCON_H1 = {
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "rope_parameters": PLAIN,
    # Powers of two, so that weights that are read back have the bits of the file.
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "attention_in_multiplier": 0.5,
    "attention_out_multiplier": 2.0,
    "key_multiplier": 4.0,
    "ssm_in_multiplier": 2.0,
    "ssm_out_multiplier": 0.5,
    "ssm_multipliers": [0.5, 2.0, 4.0, 0.25, 0.125],
    "mlp_multipliers": [4.0, 0.5],
}
MAMBA2 = {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 32}
NEMOTRON_H = {
    "head_dim": 16,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
}
NEMOTRON_H_EXPERTS = {
    "layers_block_type": ["moe", "mamba", "attention", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 80,
    "routed_scaling_factor": 1.5,
}
MINIMAX: dict[str, Any] = {
    **MIXTRAL,
    "head_dim": 32,
    "block_size": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "full_attn_alpha_factor": 1.5,
    "full_attn_beta_factor": 0.8,
    "linear_attn_alpha_factor": 2.0,
    "mlp_alpha_factor": 3.5,
    "mlp_beta_factor": 1.2,
    "rope_parameters": PLAIN,
}
SHARED_EXPERTS = {**EXPERTS, "shared_expert_intermediate_size": 80}
STATE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2", {**CONVS, "block_multiple_of": 32}),
    "lfm2-bias": ("Lfm2", {**CONVS, "conv_bias": True, "block_auto_adjust_ff_dim": False}),
    "lfm2-moe": ("Lfm2Moe", {**CONVS, **EXPERTS, "num_dense_layers": 1}),
    "qwen3.5": ("Qwen3_5", DELTA),
    "qwen3.5-moe": ("Qwen3_5Moe", {**DELTA, **SHARED_EXPERTS}),
    "bamba": (
        "Bamba",
        {
            "attn_layer_indices": [1, 3],
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 32,
            "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
        },
    ),
    "falcon-h1": ("FalconH1", FALCON_H1),
    "falcon-h1-norm": ("FalconH1", {**FALCON_H1, "mamba_rms_norm": True, "attention_bias": True}),
    "falcon-h1-gate": (
        "FalconH1",
        {"mamba_n_heads": 8, "mamba_d_ssm": None, "mamba_d_state": 32, "mamba_rms_norm": True}
        | {"mamba_norm_before_gate": False},
    ),
    "mamba2": ("Mamba2", MAMBA2),
    "mamba": ("Mamba", {"state_size": 16}),
    "falcon-mamba": ("FalconMamba", {"state_size": 32, "time_step_rank": 12, "use_bias": True}),
    "nemotron-h": ("NemotronH", NEMOTRON_H),
    "nemotron-h-moe": ("NemotronH", {**NEMOTRON_H, **NEMOTRON_H_EXPERTS}),
    "granite4-mamba": ("GraniteMoeHybrid", GRANITE4_MAMBA),
    "granite4-moe": ("GraniteMoeHybrid", {**GRANITE4_MAMBA, **MIXTRAL, "intermediate_size": 32}),
    "minimax": ("MiniMax", MINIMAX),
    "minimax-plain": ("MiniMax", {**MIXTRAL, "sliding_window": 16, "rope_parameters": PLAIN}),
    "qwen3-next": ("Qwen3Next", {**DELTA, **SHARED_EXPERTS, "mlp_only_layers": [1]}),
}
FAMILIES |= STATE_FAMILIES
# Layers that see all tokens have heads of another size, and fewer of them.
GEMMA4: dict[str, Any] = {
    **WINDOWS,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
}
# The last two layers read the keys and values of the two before.
GEMMA4_SMALL = {
    **GEMMA4,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "use_double_wide_mlp": True,
}
GEMMA4_EXPERTS = {
    **GEMMA4,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
}
GEMMA4_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("Gemma4", GEMMA4),
    "gemma4-small": ("Gemma4", GEMMA4_SMALL),
    "gemma4-moe": ("Gemma4", GEMMA4_EXPERTS),
    "gemma4-unified": ("Gemma4Unified", {**GEMMA4, "num_kv_shared_layers": 1}),
}
FAMILIES |= GEMMA4_FAMILIES
FAMILIES["gemma3n"] = (
    "Gemma3n",
    {
        **WINDOWS,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "head_dim": 16,
        "intermediate_size": [96, 96, 64, 64, 128, 96],
        "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.0, 0.3],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB - 64,  # the last tokens have the first row
        "altup_num_inputs": 3,
        "altup_active_idx": 1,
        "laurel_rank": 8,
        "final_logit_softcapping": 3.0,
    },
)


# Families that transformers does not have: name -> the family of FAMILIES or of `LIKE` that
# computes the same, what its config.json says instead.
RENAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "mimo": ("qwen2", {"architectures": ["MiMoForCausalLM"], "attention_bias": True}),
    "exaone3": (
        "llama",
        {
            "architectures": ["ExaoneForCausalLM"],
            "num_layers": 4,
            "num_hidden_layers": None,
            "layer_norm_epsilon": 1e-6,
            "activation_function": "silu",
        },
    ),
    "internlm3": (
        "qwen2",
        {"architectures": ["InternLM3ForCausalLM"], "qkv_bias": True, "bias": False},
    ),
    "minicpm": (
        "minicpm-factors",
        {
            "architectures": ["MiniCPMForCausalLM"],
            "scale_emb": 3.0,
            "scale_depth": 0.6,
            "dim_model_base": 16,
        },
    ),
}
# Where their tensors are called otherwise: of the other family, of this one.
RENAMED_TENSORS: dict[str, dict[str, str]] = {
    "exaone3": {
        "model.layers.": "transformer.h.",
        "model.embed_tokens.": "transformer.wte.",
        "model.norm.": "transformer.ln_f.",
        "self_attn.o_proj": "self_attn.out_proj",
        "self_attn.": "attn.attention.",
        "mlp.gate_proj": "mlp.c_fc_0",
        "mlp.up_proj": "mlp.c_fc_1",
        "mlp.down_proj": "mlp.c_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
    },
}
LIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "minicpm-factors": ("Granite", {**FACTORS, "attention_multiplier": 0.25}),
}


# Families whose configuration in transformers is called otherwise.
CONFIGS = {
    "Gemma3": "Gemma3Text",
    "Gemma3n": "Gemma3nText",
    "Gemma4": "Gemma4Text",
    "Gemma4Unified": "Gemma4UnifiedText",
    "Llama4": "Llama4Text",
    "Qwen3_5": "Qwen3_5Text",
    "Qwen3_5Moe": "Qwen3_5MoeText",
}


class Checkpoint(NamedTuple):
    """A saved model, and the same in transformers."""

    folder: Path
    model: Any

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits after each of the tokens: [T, VOCAB]."""
        return _logits(self.model, tuple(tokens))


@lru_cache(maxsize=64)  # what is asked of one kind of kernels is then asked of the other
@torch.inference_mode()
def _logits(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    return model(input_ids=torch.tensor([tokens])).logits[0].float()


def make_checkpoint(name: str, folder: Path) -> Checkpoint:
    kind, changes = FAMILIES.get(name) or LIKE[name]
    # Some families write into the dictionaries that they are given.
    config = getattr(transformers, f"{CONFIGS.get(kind, kind)}Config")(
        **copy.deepcopy({**SHAPE, **changes}), attn_implementation="eager"
    )
    return saved(getattr(transformers, f"{kind}ForCausalLM")(config), folder)


def make_renamed(family: str, folder: Path) -> Checkpoint:
    """The checkpoint of another family under the name and with the keys of this one."""
    like, changes = RENAMED[family]
    checkpoint = make_checkpoint(like, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key in FACTORS:
        config.pop(key, None)
    path.write_text(json.dumps({**config, **changes}))
    tensors = load_file(folder / "model.safetensors")
    renamed = {_renamed(name, RENAMED_TENSORS.get(family, {})): tensors[name] for name in tensors}
    save_file(renamed, folder / "model.safetensors")
    return checkpoint


def _renamed(name: str, parts: dict[str, str]) -> str:
    for theirs, ours in parts.items():
        name = name.replace(theirs, ours)
    return name


def saved(model: Any, folder: Path) -> Checkpoint:
    """The model with random weights, which are the same each time."""
    model.eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or name.endswith("scale"):
                parameter.add_(0.2 * noise)  # around 1, or around 0 where 1 is added
            else:
                # Eight bits may not decide which token comes next: layers add less than tokens.
                parameter.copy_((0.3 if "embed" in name or "lm_head" in name else 0.08) * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.3 * torch.rand(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    return Checkpoint(folder, model)


# name -> architecture without "ForConditionalGeneration", the family of its text part and what
# differs from that
SEEING: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", "gemma3", "gemma3_text", {"final_logit_softcapping": None}),
    "mistral3": ("Mistral3", "ministral", "mistral", {"layer_types": None, "sliding_window": None}),
    "ministral3": ("Mistral3", "ministral3", "ministral3", {"tie_word_embeddings": True}),
    "mistral4": ("Mistral3", "mistral4", "mistral4", {}),
    "qwen2-vl": ("Qwen2VL", "", "qwen2_vl_text", {"rope_parameters": MROPE}),
    "qwen2.5-vl": ("Qwen2_5_VL", "", "qwen2_5_vl_text", {"rope_parameters": MROPE}),
    "qwen3.5-vl": ("Qwen3_5", "qwen3.5", "qwen3_5_text", {"rope_parameters": MROPE_PARTIAL}),
    "gemma4": ("Gemma4", "gemma4-small", "gemma4_text", {}),
    "llama4": ("Llama4", "llama4", "llama4_text", {}),
    "gemma4-unified": ("Gemma4Unified", "gemma4-unified", "gemma4_unified_text", {}),
    "qwen3-vl": ("Qwen3VL", "", "qwen3_vl_text", {"rope_parameters": MROPE, "head_dim": 16}),
}


# Encoders that are not looked at where only the text parts are computed.
GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "position_embedding_size": 64,
    "pooling_kernel_size": 1,
    "default_output_length": 4,
}
LLAMA4_VISION = {
    **VISION,
    "intermediate_size": 128,  # of four patches
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
GEMMA4_UNIFIED_VISION = {
    "patch_size": 4,
    "mm_embed_dim": 32,
    "output_proj_dims": 32,
    "mm_posemb_size": 16,
}


def make_seeing(name: str, folder: Path) -> Checkpoint:
    """A model of text and images."""
    kind, text, text_type, changes = SEEING[name]
    like = FAMILIES[text][1] if text else {}
    text_config = copy.deepcopy({**SHAPE, **like, **changes, "model_type": text_type})
    vision_type = {"Gemma3": "siglip_vision_model", "Mistral3": "pixtral"}.get(kind)
    vision = {"depth": 1, "embed_dim": 32, "out_hidden_size": 64, "num_heads": 2}
    vision |= {"hidden_size": 64 if kind == "Qwen2VL" else 32, "intermediate_size": 48}
    if vision_type is not None:
        vision = {**VISION, "model_type": vision_type}
    unread = {"Gemma4": GEMMA4_VISION, "Gemma4Unified": GEMMA4_UNIFIED_VISION}
    vision = {**unread, "Llama4": LLAMA4_VISION}.get(kind, vision)
    outer = {"mm_tokens_per_image": 4} if kind == "Gemma3" else {}
    config = getattr(transformers, f"{kind}Config")(
        **outer,
        text_config=text_config,
        vision_config=vision,
        tie_word_embeddings=name in ("gemma3", "gemma4", "gemma4-unified", "ministral3"),
        attn_implementation="eager",
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    checkpoint = saved(model, folder)
    if kind == "Llama4":  # the whole model of this release fails without a picture
        return checkpoint._replace(model=model.language_model)
    return checkpoint

"""What files of different ages and makers mean, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from weft.config.decoder import AttentionSpec, MoeSpec, NormPosition, RopeConfig
from weft.config.model import ModelConfig, UnsupportedModel

SHAPE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
}


def read(architecture: str, **changes: Any) -> ModelConfig:
    config = {**SHAPE, "architectures": [architecture], **changes}
    return ModelConfig.from_hf(config, "test")


def attention(config: ModelConfig, layer: int = 0) -> AttentionSpec:
    return config.decoder.layer(layer).attention


def rope(config: ModelConfig, layer: int = 0) -> RopeConfig:
    found = attention(config, layer).rope
    assert found is not None
    return found


def test_the_first_files_of_gemma_3_say_little() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    config = ModelConfig.from_hf({**outer, "torch_dtype": "bfloat16"}, "test")
    assert config.num_heads == 8
    assert config.num_kv_heads == 4
    assert config.head_dim == 256
    assert (config.vocab_size, config.tie_embeddings, config.dtype) == (262_208, True, "bfloat16")
    assert [config.window(layer) for layer in range(7)] == [1024] * 5 + [0, 1024]
    assert rope(config, 0) == RopeConfig(theta=10_000.0)
    assert rope(config, 5) == RopeConfig(theta=1e6, scaling="linear", factor=8.0)
    assert config.decoder.layer(0).norms is NormPosition.BOTH


def test_scaling_of_olmo_3_is_that_of_layers_that_see_everything() -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
    config = read("Olmo3ForCausalLM", rope_theta=5e5, rope_scaling=scaling)
    assert [config.window(layer) for layer in range(4)] == [4096, 4096, 4096, 0]
    assert rope(config, 0) == RopeConfig(theta=5e5)
    assert rope(config, 3).scaling == "yarn"
    assert config.max_position == 4096


def test_only_layers_with_a_window_rotate_in_exaone_4_and_command_r7b() -> None:
    exaone = read("Exaone4ForCausalLM", sliding_window=16, sliding_window_pattern="LLG")
    cohere = read("Cohere2ForCausalLM", sliding_window=16, sliding_window_pattern=3)
    for config in (exaone, cohere):
        assert [config.window(layer) for layer in range(6)] == [16, 16, 0, 16, 16, 0]
        assert [attention(config, layer).rope is None for layer in (0, 2)] == [False, True]


def test_every_fourth_layer_of_smollm3_does_not_rotate() -> None:
    config = read("SmolLM3ForCausalLM")
    unrotated = [attention(config, layer).rope is None for layer in range(6)]
    assert unrotated == [False, False, False, True, False, False]


def test_half_of_a_head_turns_where_glm_says_nothing() -> None:
    config = read("Glm4ForCausalLM", head_dim=16)
    assert (rope(config).share, rope(config).side_by_side) == (0.5, True)


def test_the_first_files_of_phi_3_call_longrope_su() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    changes = {"original_max_position_embeddings": 512}
    config = read("Phi3ForCausalLM", rope_scaling={"type": "su", **factors}, **changes)
    assert rope(config).scaling == "longrope"
    assert rope(config).original_max_position == 512
    assert rope(config).attention_factor == pytest.approx((1 + 2 / 9) ** 0.5)


def test_pairs_of_vision_models_of_qwen_turn_by_one_of_three_positions() -> None:
    mrope = {"type": "mrope", "mrope_section": [4, 2, 2]}
    config = read("Qwen2_5_VLForConditionalGeneration", rope_theta=1e6, rope_scaling=mrope)
    assert rope(config) == RopeConfig(theta=1e6, axes=(0, 0, 0, 0, 1, 1, 2, 2))
    assert attention(config).qkv_bias


def test_pairs_of_qwen_3_vl_take_turns() -> None:
    mrope = {"rope_type": "default", "mrope_section": [4, 2, 1], "mrope_interleaved": True}
    config = read("Qwen3VLForConditionalGeneration", head_dim=16, rope_scaling=mrope)
    assert rope(config).axes == (0, 1, 2, 0, 1, 0, 0, 0)
    assert config.decoder.deepstack == 3


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (
            "MinistralForCausalLM",
            {"layer_types": ["chunked_attention"] * 6},
            "layer_types has 'chunked_attention'; only 'full_attention'",
        ),
        ("Olmo3ForCausalLM", {"layer_types": ["full_attention"]}, "1 layers of 6"),
        (
            "GraniteMoeHybridForCausalLM",
            {
                "num_local_experts": 0,
                "shared_intermediate_size": 96,
                "layer_types": ["mamba", "attention"],
            },
            "layer_types has 2 layers of 6",
        ),
        (
            "GraniteMoeHybridForCausalLM",
            {"num_local_experts": 2, "num_experts_per_tok": 3, "layer_types": ["attention"] * 6},
            "a token gets 3 experts, but a layer has only 2",
        ),
        ("CohereForCausalLM", {"use_qk_norm": True}, "use_qk_norm is True; only False"),
        ("StableLmForCausalLM", {"qk_layernorm": True}, "qk_layernorm is True"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50"),
        (
            "Gemma3nForCausalLM",
            {
                "altup_active_idx": 4,
                "num_kv_shared_layers": 0,
                "vocab_size_per_layer_input": 1_000,
            },
            "altup_active_idx is 4 of 4",
        ),
        (
            "Gemma3nForCausalLM",
            {"activation_sparsity_pattern": [0.5, 1.0]},
            r"activation_sparsity_pattern is \[0.5, 1.0\]; it must be a number from 0 to below 1",
        ),
        (
            "Gemma3nForCausalLM",
            {"intermediate_size": [64]},
            r"intermediate_size is \[64\]; it must",
        ),
        (
            "Gemma3nForCausalLM",
            {"vocab_size_per_layer_input": 100, "num_kv_shared_layers": 0},
            "vocab_size_per_layer_input is 100; it must be the vocab_size",
        ),
        (
            "Gemma4ForCausalLM",
            {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "all"},
            "a decoder whose tokens see those after them",
        ),
        (
            "Gemma4ForCausalLM",
            {"vocab_size_per_layer_input": 9},
            r"vocab_size_per_layer_input is 9; only the vocab_size \(",
        ),
        (
            "Gemma4ForCausalLM",
            {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 6},
            "num_kv_shared_layers is 6; it must be 0 to 5",
        ),
        (
            "Gemma4ForCausalLM",
            {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 1},
            "no layer before those is full_attention",
        ),
        (
            "Gemma4ForCausalLM",
            {"hidden_size_per_layer_input": 0, "global_head_dim": 31},
            "layer 5 has heads of 31: their size must be even",
        ),
        (
            "Gemma4ForCausalLM",
            {"hidden_size_per_layer_input": 0, "per_layer_config": {"last": {"head_dim": 32}}},
            "per_layer_config has 'last'; its keys must be numbers of layers",
        ),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope"}}, "no 'long_factor'"),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}},
            r"long_factor is \[.*; it must hold 8 numbers above 0",
        ),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 0}},
            "beta_fast is 0; it must be a number greater than 0",
        ),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "pattern is 0; it must be at least 1"),
        (
            "Exaone4ForCausalLM",
            {"sliding_window": 16, "sliding_window_pattern": ""},
            "sliding_window_pattern is ''; it must be at least 1",
        ),
        ("ArceeForCausalLM", {"hidden_act": "silu"}, "hidden_act is 'silu'; only 'relu2'"),
        ("GlmForCausalLM", {"partial_rotary_factor": 1.5}, "it must be more than 0"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read(architecture, **changes)


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
}


def layers_with_experts(config: ModelConfig) -> list[int]:
    layers = range(config.num_layers)
    return [layer for layer in layers if isinstance(config.decoder.layer(layer).mlp, MoeSpec)]


def test_some_layers_of_qwen_3_have_experts() -> None:
    assert layers_with_experts(read("Qwen3MoeForCausalLM", **EXPERTS)) == [0, 1, 2, 3, 4, 5]
    some = read("Qwen3MoeForCausalLM", **EXPERTS, decoder_sparse_step=2, mlp_only_layers=[3])
    assert layers_with_experts(some) == [1, 5]


def test_the_first_layers_of_glm_45_and_those_outside_of_ernie_have_none() -> None:
    glm = read("Glm4MoeForCausalLM", **GROUPED, first_k_dense_replace=2)
    assert layers_with_experts(glm) == [2, 3, 4, 5]
    ernie = {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32}
    bounds = {"moe_layer_start_index": 1, "moe_layer_end_index": -2, "moe_layer_interval": 2}
    assert layers_with_experts(read("Ernie4_5_MoeForCausalLM", **ernie, **bounds)) == [1, 3]


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (
            "Qwen3MoeForCausalLM",
            {**EXPERTS, "num_experts_per_tok": 9},
            "9 experts, but a layer has only 8",
        ),
        ("Qwen3MoeForCausalLM", {**EXPERTS, "num_experts": 2000}, "2,000 experts; at most 1,024"),
        ("Qwen3MoeForCausalLM", {**EXPERTS, "hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("Qwen3MoeForCausalLM", {"num_experts": 8}, "no 'num_experts_per_tok'"),
        ("Glm4MoeForCausalLM", {**GROUPED, "n_group": 3}, "8 experts in 3 groups"),
        ("Glm4MoeForCausalLM", {**GROUPED, "topk_group": 5}, "of which 5 are chosen"),
        ("Glm4MoeForCausalLM", {**GROUPED, "topk_group": 1}, "gets 3 experts, but .* have 2"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv"),
        ("Ernie4_5_MoeForCausalLM", {"use_bias": True}, "use_bias"),
    ],
)
def test_experts_that_do_not_fit_together_are_refused(
    architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read(architecture, **changes)

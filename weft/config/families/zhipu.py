"""GLM-4: half of each head rotates, in adjacent pairs; the release of April 2025 also norms the
outputs of attention and the feed-forward part. GLM 4.5 to 4.7 have experts."""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import count
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormPosition,
    QkNorm,
    TensorNames,
)
from weft.config.families import gguf
from weft.config.families.experts import sigmoid_experts, with_experts
from weft.config.families.family import Config, Family, activation, flag
from weft.config.families.rope import read_rope


def _glm(config: Config) -> DecoderSpec:
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config, is_partial=True, side_by_side=True),
            qkv_bias=flag(config, "attention_bias", True),
        ),
        mlp=MlpSpec(activation=activation(config)),
    )
    return DecoderSpec(layers=(layer,), names=TensorNames(gate_up=("gate_up_proj",)))


def _glm4_moe(config: Config) -> DecoderSpec:
    """GLM 4.5: the first layers have no experts; layers after `num_hidden_layers` are for
    speculation (`config/heads.py`)."""
    qk_norm = QkNorm.HEAD if flag(config, "use_qk_norm") else QkNorm.NONE
    plain = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config, is_partial=True),
            qk_norm=qk_norm,
            qkv_bias=flag(config, "attention_bias"),
        ),
        mlp=MlpSpec(activation=activation(config)),
    )
    num_plain = count(config, "first_k_dense_replace")
    return with_experts(
        config,
        DecoderSpec(layers=(plain,)),
        sigmoid_experts(config),
        lambda layer: layer >= num_plain,
    )


def _glm4(config: Config) -> DecoderSpec:
    spec = _glm(config)
    names = replace(
        spec.names,
        attention_post_norm="post_self_attn_layernorm",
        mlp_post_norm="post_mlp_layernorm",
    )
    return replace(spec, layers=(replace(spec.layer(0), norms=NormPosition.BOTH),), names=names)


_DEFAULTS = {
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
}
FAMILIES = {
    "Glm": Family(
        read=_glm,
        defaults=_DEFAULTS,
        gguf={
            "chatglm": gguf.Architecture(
                is_partial=True,
                has_gate_in_up=True,
                splits_qkv=True,
                parts={"ffn_up": "mlp.gate_up_proj"},
            )
        },
    ),
    "Glm4": Family(
        read=_glm4,
        defaults=_DEFAULTS,
        gguf={
            "glm4": gguf.Architecture(
                is_partial=True,
                has_gate_in_up=True,
                splits_qkv=True,
                parts={
                    "ffn_up": "mlp.gate_up_proj",
                    "post_attention_norm": "post_self_attn_layernorm",
                    "post_ffw_norm": "post_mlp_layernorm",
                },
            )
        },
    ),
    "Glm4Moe": Family(
        read=_glm4_moe,
        defaults={
            "partial_rotary_factor": 0.5,
            "first_k_dense_replace": 1,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
        },
        gguf={
            "glm4moe": gguf.Architecture(
                more=gguf.sigmoid_experts,
                reads=gguf.EXPERTS,
                is_partial=True,
                has_qk_norm=True,
                parts=gguf.MLP_NORM,
            )
        },
    ),
}

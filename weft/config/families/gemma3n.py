"""Gemma 3n: several versions of each hidden state (AltUp), products of low rank beside attention
(LAuReL), inputs for each layer, K and V of earlier layers, and gates that are mostly cut off. It
sees and hears (`config/vision/gemma3n.py`)."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

from weft.config.config_json import get, number, rope_theta, section, size
from weft.config.decoder import (
    AltUpSpec,
    AttentionSpec,
    DecoderSpec,
    LayerInputSpec,
    LayerSpec,
    MlpSpec,
    NormPosition,
    QkNorm,
    RopeConfig,
    TensorNames,
)
from weft.config.families import gguf
from weft.config.families.family import (
    SLIDING,
    Config,
    Family,
    activation,
    every,
    flag,
    layer_types,
    window,
)
from weft.config.families.gemma4 import GELU, kv_owners
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.rope import rope_by_type, rope_of
from weft.config.model_errors import UnsupportedModel
from weft.config.vision.gemma3n import gemma3n_towers
from weft.json_types import JsonObject

PERIOD = 5  # of layers, the last of which sees all tokens
NUM_CUT = 10  # first layers whose gates are cut off, in a file that does not say it
SHARE_CUT = 0.95  # of their gates
THETA = 1e6
SLIDING_THETA = 10_000.0
ROW_STEP = 64


def _gemma3n(config: Config) -> DecoderSpec:
    kinds = layer_types(config, every(PERIOD))
    bias = flag(config, "attention_bias")
    cuts = _cuts(config)
    sizes = _sizes(config)

    def layer(index: int, kind: str, owner: int | None) -> LayerSpec:
        attention = AttentionSpec(
            window=window(config, kind),
            rope=_rope(config, kind),
            scale=1.0,
            qk_norm=QkNorm.HEAD,
            qkv_bias=bias,
            out_bias=bias,
            kv_of=owner,
            norms_values=True,
        )
        gelu = activation(config, (GELU,), "hidden_activation")
        return LayerSpec(
            attention=attention,
            mlp=MlpSpec(size=sizes[index], activation=gelu, cut=cuts[index]),
            norms=NormPosition.BOTH,
        )

    owners = kv_owners(config, kinds)
    return DecoderSpec(
        layers=tuple(map(layer, range(len(kinds)), kinds, owners)),
        names=TensorNames(mlp_norm="pre_feedforward_layernorm"),
        embedding_scale=math.sqrt(size(config, "hidden_size")),
        layer_inputs=_layer_inputs(config),
        altup=_altup(config),
        logit_cap=number(config, "final_logit_softcapping", 30.0, low=0.0),
    )


def _sizes(config: Config) -> list[int]:
    """The inner size of each layer's feed-forward part."""
    num_layers = size(config, "num_hidden_layers")
    sizes = get(config, "intermediate_sizes", list, [])
    if not sizes:
        return [size(config, "intermediate_size")] * num_layers
    if len(sizes) != num_layers or not all(type(one) is int and one > 0 for one in sizes):
        raise UnsupportedModel(
            f"intermediate_size is {str(sizes)[:64]}; it must be a number above 0, or one for each "
            f"of {num_layers} layers"
        )
    return sizes


def _cuts(config: Config) -> list[float | None]:
    """For each layer, how many deviations above the mean a gate must be; None: gates are not cut
    off. The file has the share of gates that are, if these are normally distributed."""
    num_layers = size(config, "num_hidden_layers")
    shares = get(config, "activation_sparsity_pattern", list, [])
    if not shares:
        num_cut = NUM_CUT if num_layers > NUM_CUT else 0
        shares = [SHARE_CUT] * num_cut + [0.0] * (num_layers - num_cut)
    is_right = all(type(share) in (int, float) and 0 <= share < 1 for share in shares)
    if len(shares) != num_layers or not is_right:
        raise UnsupportedModel(
            f"activation_sparsity_pattern is {str(shares)[:64]}; it must be a number from 0 to "
            f"below 1 for each of {num_layers} layers"
        )
    normal = NormalDist()
    return [normal.inv_cdf(share) if share else None for share in shares]


def _rope(config: Config, kind: str) -> RopeConfig:
    """The rotation of one kind of layers. Older files have the bases by themselves."""
    if "rope_parameters" in config:
        return rope_by_type(config, kind, SLIDING_THETA if kind == SLIDING else THETA)
    if kind == SLIDING:
        theta = rope_theta(config, SLIDING_THETA, key="rope_local_base_freq")
        return rope_of(config, {}, theta=theta)
    scaling = section(config, "rope_scaling")
    return rope_of(config, scaling, theta=rope_theta(config, THETA))


def _layer_inputs(config: Config) -> LayerInputSpec:
    vocab_size = size(config, "vocab_size")
    num_rows = size(config, "vocab_size_per_layer_input", 262_144)
    if num_rows > vocab_size or (num_rows < vocab_size and num_rows % ROW_STEP):
        raise UnsupportedModel(
            f"vocab_size_per_layer_input is {num_rows:,}; it must be the vocab_size "
            f"({vocab_size:,}), or a multiple of {ROW_STEP} below it"
        )
    return LayerInputSpec(
        size=size(config, "hidden_size_per_layer_input", 256),
        activation=activation(config, (GELU,), "hidden_activation"),
        num_rows=num_rows if num_rows < vocab_size else 0,
    )


def _altup(config: Config) -> AltUpSpec:
    num = size(config, "altup_num_inputs", 4)
    active = get(config, "altup_active_idx", int, 0)
    if num < 2 or not 0 <= active < num:
        raise UnsupportedModel(
            f"altup_active_idx is {active} of {num} (altup_num_inputs); there must be at least 2, "
            "and one of them active"
        )
    return AltUpSpec(
        num=num,
        active=active,
        rank=size(config, "laurel_rank", 64),
        scales_output=flag(config, "altup_correct_scale", True),
    )


def _implied(config: Config) -> JsonObject:
    """The largest feed-forward part, if a file has the size of each."""
    sizes = config.get("intermediate_size")
    if not isinstance(sizes, list):
        return {}
    known = [one for one in sizes if type(one) is int]
    return {"intermediate_size": max(known, default=0), "intermediate_sizes": sizes}


# GGUF files


def _gguf_gemma3n(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """The gates that are cut off are those of most models: llama.cpp reads no others from files."""
    sizes = keys.numbers("feed_forward_length")
    return {
        "layer_types": gguf.by_windows(keys),
        "sliding_window": keys.number("attention.sliding_window", int, 512),
        "intermediate_size": max(sizes),
        "intermediate_sizes": sizes,
        "num_kv_shared_layers": keys.number("attention.shared_kv_layers", int, 0),
        "hidden_size_per_layer_input": keys.number("embedding_length_per_layer_input", int, 256),
        "vocab_size_per_layer_input": keys.num_rows("per_layer_token_embd.weight"),
        "laurel_rank": keys.num_rows("blk.0.laurel_l.weight"),
        "final_logit_softcapping": keys.number("final_logit_softcapping", float, 30.0),
        "altup_num_inputs": keys.number("altup.num_inputs", int, 4),
        "altup_active_idx": keys.number("altup.active_idx", int, 0),
        "rope_parameters": {
            "full_attention": found["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": SLIDING_THETA},
        },
    }


_GGUF_NAMES = {
    **gguf.NORMS_AFTER,
    "ffn_norm": "pre_feedforward_layernorm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_GEMMA3N = Family(
    read=_gemma3n,
    defaults={
        "vocab_size": 262_400,
        "hidden_size": 2_048,
        "intermediate_size": 16_384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "sliding_window": 512,
        "num_kv_shared_layers": 15,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    implied=_implied,
)
ARCHITECTURES = {
    "Gemma3nForCausalLM": replace(
        _GEMMA3N,
        gguf={
            "gemma3n": gguf.Architecture(
                more=_gguf_gemma3n,
                reads=("final_logit_softcapping",),
                parts=_GGUF_NAMES,
                outside={
                    "per_layer_token_embd": "model.embed_tokens_per_layer",
                    "per_layer_model_proj": "model.per_layer_model_projection",
                    "per_layer_proj_norm": "model.per_layer_projection_norm",
                    "altup_proj": "model.altup_projections",
                    "altup_unembd_proj": "model.altup_unembed_projections",
                },
                by_layer=("feed_forward_length",),
            )
        },
    ),
    "Gemma3nForConditionalGeneration": replace(_GEMMA3N, tower=gemma3n_towers),
}

"""Families of several makers whose MLP has no gate: BigCode (StarCoder 2), Arcee, NVIDIA
(Nemotron)."""

from __future__ import annotations

from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormKind,
    TensorNames,
)
from weft.config.families import gguf
from weft.config.families.family import (
    Config,
    Family,
    activation,
    flag,
    window,
)
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.rope import read_rope
from weft.json_types import JsonObject


def _starcoder2(config: Config) -> DecoderSpec:
    bias = flag(config, "use_bias", True)
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config),
            window=window(config),
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpSpec(
            activation=activation(config, ("gelu_pytorch_tanh",)),
            is_gated=False,
            bias=bias,
        ),
    )
    return DecoderSpec(
        layers=(layer,),
        norm=NormKind.LAYER_BIAS,
        names=TensorNames(gate_up=("c_fc",), down="c_proj"),
    )


def _arcee(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias")
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config),
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpSpec(
            activation=activation(config, ("relu2",)),
            is_gated=False,
            bias=flag(config, "mlp_bias"),
        ),
    )
    return DecoderSpec(layers=(layer,), names=TensorNames(gate_up=("up_proj",)))


def _nemotron(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias")
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config, is_partial=True),
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpSpec(
            activation=activation(config, ("relu2",)),
            is_gated=False,
            bias=flag(config, "mlp_bias"),
        ),
    )
    norm = NormKind.LAYER_PLUS_ONE_BIAS
    if flag(config, "norm_weights_are_whole"):  # only in weft's own config.json (`config/gguf.py`)
        norm = NormKind.LAYER_BIAS
    return DecoderSpec(
        layers=(layer,),
        norm=norm,
        names=TensorNames(gate_up=("up_proj",)),
    )


def _gguf_starcoder2(keys: ArchitectureKeys, found: Found) -> JsonObject:
    window = keys.number("attention.sliding_window", int, 0)
    return {**gguf.biases(keys, found), "sliding_window": window}


def _gguf_nemotron(keys: ArchitectureKeys, found: Found) -> JsonObject:
    # Converters have added 1 to the weights of norms.
    return {"norm_weights_are_whole": True, "hidden_act": "relu2"}


FAMILIES = {
    "Starcoder2": Family(
        read=_starcoder2,
        defaults={"tie_word_embeddings": True},
        norm_eps_key="norm_epsilon",
        gguf={
            "starcoder2": gguf.Architecture(
                more=_gguf_starcoder2,
                norm_eps=gguf.LAYER_NORM_EPS,
                has_gate=False,
                parts={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
            )
        },
    ),
    "Arcee": Family(read=_arcee, gguf={"arcee": gguf.Architecture(has_pairs=True, has_gate=False)}),
    "Nemotron": Family(
        read=_nemotron,
        defaults={"partial_rotary_factor": 0.5},
        norm_eps_key="norm_eps",
        gguf={
            "nemotron": gguf.Architecture(
                more=_gguf_nemotron, norm_eps=gguf.LAYER_NORM_EPS, has_gate=False, is_partial=True
            )
        },
    ),
}

"""GPT-NeoX and Pythia: attention and feed-forward part are parallel, each with its own norm. In one
tensor, the rows of a head's query, key and value are consecutive."""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import get
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormKind,
    NormPosition,
    TensorNames,
)
from weft.config.families import gguf
from weft.config.families.family import Config, Family, activation, flag
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.rope import read_rope
from weft.json_types import JsonObject

QKV = ("query", "key", "value")
NAMES = TensorNames(
    attention="attention",
    qkv=("query_key_value",),
    qkv_by_head=True,
    out="dense",
    gate_up=("dense_h_to_4h",),
    down="dense_4h_to_h",
    norm="gpt_neox.final_layer_norm",
    embedding="gpt_neox.embed_in",
    layers="gpt_neox.layers",
)


def _gpt_neox(config: Config) -> DecoderSpec:
    # The keys of files from before transformers 5.
    rotation = {
        "partial_rotary_factor": get(config, "rotary_pct", float, 0.25),
        "rope_theta": get(config, "rotary_emb_base", float, 10_000.0),
    }
    bias = flag(config, "attention_bias", True)
    is_parallel = flag(config, "use_parallel_residual", True)
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope({**rotation, **config}, is_partial=True),
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpSpec(
            activation=activation(config, ("gelu", "gelu_new", "relu")),
            is_gated=False,
            bias=True,
        ),
        norms=NormPosition.PARALLEL_TWO if is_parallel else NormPosition.PRE,
    )
    names = NAMES
    if flag(config, "heads_are_apart"):  # only in weft's own config.json (`config/gguf.py`)
        names = replace(NAMES, qkv=QKV, qkv_by_head=False)
    return DecoderSpec(layers=(layer,), norm=NormKind.LAYER_BIAS, names=names)


# GGUF files


def _gguf_gpt_neox(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """GPT-NeoX. Converters have put the queries of all heads first, then their keys, then their
    values."""
    return {
        "heads_are_apart": True,
        "hidden_act": "gelu",
        "use_parallel_residual": keys.number("use_parallel_residual", bool, True),
    }


FAMILIES = {
    "GPTNeoX": Family(
        read=_gpt_neox,
        norm_eps_key="layer_norm_eps",
        gguf={
            "gptneox": gguf.Architecture(
                more=_gguf_gpt_neox,
                reads=("use_parallel_residual",),
                norm_eps=gguf.LAYER_NORM_EPS,
                has_gate=False,
                is_partial=True,
                splits_qkv=True,
                parts={
                    "attn_q": "attention.query",
                    "attn_k": "attention.key",
                    "attn_v": "attention.value",
                    "attn_output": "attention.dense",
                    "ffn_up": "mlp.dense_h_to_4h",
                    "ffn_down": "mlp.dense_4h_to_h",
                },
                outside={
                    "token_embd": "gpt_neox.embed_in",
                    "output_norm": "gpt_neox.final_layer_norm",
                },
                layers="gpt_neox.layers",
            )
        },
    ),
}

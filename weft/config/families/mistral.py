"""Mistral, Ministral and Ministral 3, whose queries grow with their position; also the text part of
models that take pictures (Mistral Small 3.1, Ministral 3); Mixtral, whose feed-forward part is
experts."""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import get, number, section
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    ExpertNames,
    LayerSpec,
    MlpSpec,
    TensorNames,
)
from weft.config.families import gguf
from weft.config.families.deepseek import read_mistral4
from weft.config.families.experts import softmax_experts
from weft.config.families.family import (
    FULL,
    SLIDING,
    Config,
    Family,
    activation,
    layer_types,
    window,
)
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.meta import gguf_llama
from weft.config.families.rope import read_rope
from weft.config.vision.pixtral import mistral3
from weft.json_types import JsonObject


def _mistral(config: Config) -> DecoderSpec:
    layer = LayerSpec(
        attention=AttentionSpec(rope=read_rope(config), window=window(config)),
        mlp=MlpSpec(activation=activation(config)),
    )
    return DecoderSpec(layers=(layer,))


def _ministral(config: Config) -> DecoderSpec:
    like = _mistral(config).layer(0)
    layers = []
    for kind in layer_types(config, lambda _: SLIDING if window(config) else FULL):
        attention = replace(like.attention, window=window(config, kind))
        layers.append(replace(like, attention=attention))
    return DecoderSpec(layers=tuple(layers))


def _ministral3(config: Config) -> DecoderSpec:
    layer = _mistral(config).layer(0)
    rope = layer.attention.rope
    assert rope is not None
    values = section(config, "rope_parameters")
    growth = number(values, "llama_4_scaling_beta", 0.0, low=0.0)
    attention = replace(layer.attention, rope=replace(rope, query_growth=growth))
    return DecoderSpec(layers=(replace(layer, attention=attention),))


def _mistral3(config: Config) -> DecoderSpec:
    """A model for text and images. Its text configuration names the text model in it."""
    kind = get(get(config, "text_config", dict), "model_type", str, "mistral")
    if kind == "ministral3":
        return _ministral3(config)
    if kind == "mistral4":
        return read_mistral4(config)
    return _mistral(config)


def _mixtral(config: Config) -> DecoderSpec:
    layer = _mistral(config).layer(0)
    experts = softmax_experts(
        config,
        inner="intermediate_size",
        is_normed=True,
    )
    names = TensorNames(
        mlp="block_sparse_moe",
        experts=ExpertNames(gate_up=("w1", "w3"), down="w2"),
    )
    return DecoderSpec(layers=(replace(layer, mlp=experts),), names=names)


# GGUF files


def _gguf_mistral3(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Ministral 3, if queries grow with their position; else Mistral."""
    growth = keys.number("attention.temperature_scale", float, 0.0)
    if not growth:
        return gguf_llama(keys, found)
    rope = {**found["rope_parameters"], "llama_4_scaling_beta": growth}
    mscale = keys.number("rope.scaling.yarn_log_multiplier", float, 0.0)
    if mscale:
        rope |= {"mscale": mscale, "mscale_all_dim": mscale}
    return {"architectures": ["Ministral3ForCausalLM"], "rope_parameters": rope}


_MISTRAL3 = Family(read=_mistral3, defaults={"head_dim": 128}, tower=mistral3)
FAMILIES = {
    "Mistral": Family(
        read=_mistral,
        gguf={
            "mistral3": gguf.Architecture(
                more=_gguf_mistral3, reads=gguf.EXPERTS, has_pairs=True, parts=gguf.MIXTRAL_NAMES
            )
        },
    ),
    "Ministral": Family(read=_ministral),
    "Ministral3": Family(read=_ministral3, defaults={"head_dim": 128}),
    "Mixtral": Family(read=_mixtral, defaults={"num_local_experts": 8, "num_experts_per_tok": 2}),
}
ARCHITECTURES = {"Mistral3ForConditionalGeneration": _MISTRAL3}

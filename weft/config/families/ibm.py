"""Granite 3 and 4, with experts or without: Llama with factors in four places. Granite 4 stores
gate and up as one tensor, and has a shared part beside experts; some models have no positions, and
others have Mamba 2 in place of attention in most layers. NAVER's HyperCLOVA X also has these
factors, and norms after each part."""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import get, size
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    ExpertNames,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    NormPosition,
    StateNames,
    TensorNames,
)
from weft.config.families import gguf
from weft.config.families.experts import softmax_experts
from weft.config.families.family import (
    FULL,
    Config,
    Family,
    activation,
    flag,
    layer_types,
    mlp_of,
    scale,
)
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.rope import read_rope
from weft.config.families.states import (
    GGUF_MAMBA,
    GGUF_MAMBA_FLAT,
    LINEAR,
    gguf_mamba,
    gguf_mamba_names,
    read_mamba,
    with_states,
)
from weft.config.model_errors import UnsupportedModel
from weft.json_types import JsonObject

_KINDS = {"attention": FULL, "mamba": LINEAR}  # names in older files


def _granite(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias")
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config),
            scale=scale(config, "attention_multiplier"),
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=mlp_of(config),
        residual_scale=scale(config, "residual_multiplier"),
    )
    return DecoderSpec(
        layers=(layer,),
        embedding_scale=scale(config, "embedding_multiplier"),
        logit_scale=1 / scale(config, "logits_scaling"),
    )


_EXPERTS = ExpertNames(
    router="router.layer",
    all_gate_up="input_linear.weight",
    all_down="output_linear.weight",
    shared="shared_mlp",
    shared_is_beside=True,
)
_MOE_NAMES = TensorNames(mlp="block_sparse_moe", experts=_EXPERTS)
_SHARED_NAMES = replace(_MOE_NAMES, gate_up=("input_linear",), down="output_linear")


def _experts(config: Config) -> MoeSpec:
    return softmax_experts(
        config,
        inner="intermediate_size",
        scores="chosen",
    )


def _granite_moe(config: Config) -> DecoderSpec:
    spec = _granite(config)
    layer = replace(spec.layer(0), mlp=_experts(config))
    return replace(spec, layers=(layer,), names=_names(config, _MOE_NAMES))


def _names(config: Config, names: TensorNames) -> TensorNames:
    """`names`; for a GGUF file, which has separate tensors of gates and ups, Llama's names."""
    if flag(config, "gates_and_ups_are_apart"):  # only in weft's own config.json (`config/gguf.py`)
        return TensorNames()
    return names


def _granite_shared(config: Config) -> DecoderSpec:
    """Granite with experts and a shared part."""
    spec = _granite(config)
    shared_size = get(config, "shared_intermediate_size", int, 0)
    experts = replace(_experts(config), shared_size=shared_size)
    layer = replace(spec.layer(0), mlp=experts)
    return replace(spec, layers=(layer,), names=_names(config, _SHARED_NAMES))


def _granite4(config: Config) -> DecoderSpec:
    kinds = [_KINDS.get(kind, kind) for kind in get(config, "layer_types", list)]
    with_kinds = {**config, "layer_types": kinds}
    if get(config, "num_local_experts", int):
        spec = _granite_shared(config)
        layer = spec.layer(0)
    else:
        # Without experts, the shared part is the whole feed-forward part.
        names = _names(config, replace(_SHARED_NAMES, mlp="shared_mlp"))
        spec = replace(_granite(config), names=names)
        layer = spec.layer(0)
        shared = MlpSpec(
            size=size(config, "shared_intermediate_size"),
            activation=activation(config),
            bias=flag(config, "mlp_bias"),
        )
        layer = replace(layer, mlp=shared)
    attention = layer.attention
    if config.get("position_embedding_type") != "rope":
        attention = replace(attention, rope=None)
    state_names = StateNames(
        mixer="mamba",
        inputs=("in_proj",),
        decay_is_final=flag(config, "decays_are_final"),
    )
    spec = replace(
        spec,
        layers=(replace(layer, attention=attention),),
        names=replace(spec.names, state=state_names),
    )
    if LINEAR not in layer_types(with_kinds, _of_granite, (FULL, LINEAR)):
        return spec
    return with_states(with_kinds, spec, read_mamba(config), LINEAR, _of_granite)


def _of_granite(layer: int) -> str:
    return LINEAR


def _bamba(config: Config) -> DecoderSpec:
    """Mamba 2 except in the layers that the file lists. Half of a head rotates, whatever the file
    contains."""
    attention = get(config, "attn_layer_indices", list, [])
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope({**config, "partial_rotary_factor": 0.5}, is_partial=True),
            qkv_bias=flag(config, "attention_bias"),
            out_bias=flag(config, "attention_bias"),
        ),
        mlp=mlp_of(config),
    )
    names = TensorNames(
        mlp="feed_forward",
        mlp_norm="pre_ff_layernorm",
        norm="model.final_layernorm",
        state=StateNames(mixer="mamba", inputs=("in_proj",)),
    )
    spec = DecoderSpec(layers=(layer,), names=names)

    def kind(index: int) -> str:
        return FULL if index in attention else LINEAR

    with_kinds = {key: value for key, value in config.items() if key != "layer_types"}
    return with_states(with_kinds, spec, read_mamba(config), LINEAR, kind)


def _hyperclovax(config: Config) -> DecoderSpec:
    """Granite, but logits are multiplied by `logits_scaling`, not divided by it."""
    spec = _granite(config)
    layer = spec.layer(0)
    if config.get("attention_multiplier") is None:
        layer = replace(layer, attention=replace(layer.attention, scale=0.0))
    if flag(config, "use_post_norm", True):
        layer = replace(layer, norms=NormPosition.BOTH)
    return replace(
        spec,
        layers=(layer,),
        logit_scale=scale(config, "logits_scaling"),
        names=TensorNames(attention_post_norm="post_norm1", mlp_post_norm="post_norm2"),
    )


# GGUF files


def _gguf_granite(keys: ArchitectureKeys, found: Found) -> JsonObject:
    if not _has_positions(keys):
        raise UnsupportedModel(
            f"{keys.full('rope.scaling.finetuned')} is false: without positions, Granite is not "
            "supported as a GGUF file"
        )
    return _gguf_factors(keys, found)


def _has_positions(keys: ArchitectureKeys) -> bool:
    """Whether queries and keys have positions, by the key of Granite's files."""
    return keys.number("rope.scaling.finetuned", bool, True)


def _gguf_factors(keys: ArchitectureKeys, found: Found) -> JsonObject:
    scale = keys.number("attention.scale", float, 0.0)
    return {
        "embedding_multiplier": gguf.factor("embedding_scale", keys),
        "residual_multiplier": gguf.factor("residual_scale", keys),
        "attention_multiplier": scale or found["head_dim"] ** -0.5,
        "logits_scaling": gguf.factor("logit_scale", keys),
    }


def _gguf_experts(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Granite with experts; with a shared part it is another class."""
    size = keys.number("expert_shared_feed_forward_length", int, 0)
    values: JsonObject = {"gates_and_ups_are_apart": True}
    if size:
        values["architectures"] = ["GraniteMoeSharedForCausalLM"]
        values["shared_intermediate_size"] = size
    return values


# Softmax of all with weights that sum to 1 is the same as softmax of the chosen.
_gguf_granite_moe = gguf.experts(
    gguf.SOFTMAX, {**gguf.COUNTS, "intermediate_size": gguf.SIZE}, _gguf_experts, _gguf_granite
)


_gguf_mamba = gguf_mamba()


def _gguf_granite_hybrid(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Granite 4. The result has the size of the shared part, even if there are no experts."""
    wanted = {
        "num_local_experts": gguf.GgufKey("expert_count", int, 0),
        "num_experts_per_tok": gguf.GgufKey("expert_used_count", int, 0),
        "shared_intermediate_size": gguf.GgufKey(
            "expert_shared_feed_forward_length", int, like="intermediate_size"
        ),
    }
    values = gguf.said(keys, found, wanted)
    if not values["num_local_experts"]:
        values["intermediate_size"] = values["shared_intermediate_size"]
    return {
        **values,
        **_gguf_factors(keys, found),
        **_gguf_mamba(keys, found),
        "position_embedding_type": "rope" if _has_positions(keys) else "nope",
        "gates_and_ups_are_apart": True,
    }


FAMILIES = {
    "Granite": Family(
        read=_granite,
        gguf={
            "granite": gguf.Architecture(more=_gguf_granite, reads=gguf.FACTORS, has_pairs=True),
            # The file has the factors that follow from the sizes, as factors of Granite.
            "minicpm": gguf.Architecture(more=_gguf_granite, reads=gguf.FACTORS, has_pairs=True),
        },
    ),
    "HyperCLOVAX": Family(read=_hyperclovax),
    "GraniteMoe": Family(
        read=_granite_moe,
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
        gguf={
            "granitemoe": gguf.Architecture(
                more=_gguf_granite_moe, reads=(*gguf.FACTORS, *gguf.EXPERTS), has_pairs=True
            )
        },
    ),
    "Bamba": Family(read=_bamba),
    "GraniteMoeShared": Family(
        read=_granite_shared,
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "GraniteMoeHybrid": Family(
        read=_granite4,
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
        gguf={
            "granitehybrid": gguf.Architecture(
                more=_gguf_granite_hybrid,
                reads=(*gguf.FACTORS, *gguf.EXPERTS),
                has_pairs=True,
                parts=gguf_mamba_names("mamba"),
                flat=GGUF_MAMBA_FLAT,
                convs=gguf.STATE_CONVS,
                states=GGUF_MAMBA,
            )
        },
    ),
}

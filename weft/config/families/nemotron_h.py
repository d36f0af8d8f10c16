"""NVIDIA's Nemotron-H: every layer is one part, which is Mamba 2, attention without positions, a
feed-forward part without a gate, or experts without gates, in the order of a pattern."""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import MAX_LAYERS, get, require, size
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    ExpertNames,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    StateNames,
    TensorNames,
)
from weft.config.families import gguf
from weft.config.families.experts import sigmoid_experts
from weft.config.families.family import Config, Family, activation, flag
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.states import (
    GGUF_MAMBA,
    GGUF_MAMBA_FLAT,
    MambaKeys,
    gguf_mamba,
    gguf_mamba_names,
    read_mamba,
)
from weft.config.model_errors import BadConfig, UnsupportedModel
from weft.json_types import JsonObject

_KEYS = MambaKeys(
    heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    groups="n_groups",
    state_dim="ssm_state_size",
    taps="conv_kernel",
    conv_bias="use_conv_bias",
    bias="use_bias",
    times_hidden=False,
)
_NAMES = TensorNames(
    attention="mixer",
    mlp="mixer",
    gate_up=("up_proj",),
    attention_norm="norm",
    mlp_norm="norm",
    norm="backbone.norm_f",
    embedding="backbone.embeddings",
    layers="backbone.layers",
    state=StateNames(mixer="mixer", inputs=("in_proj",)),
    experts=ExpertNames(gate_up=("up_proj",), all_gate_up="experts.up_proj"),
)
# A pattern has a letter for each layer; lists have names, of which some are older.
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_OLDER = {"linear_attention": "mamba", "full_attention": "attention"}
_KINDS = ("mamba", "attention", "mlp", "moe")


def _kinds(config: Config) -> list[str]:
    """The kind of each layer. Raises BadConfig and UnsupportedModel."""
    listed = get(config, "layers_block_type", list, [])
    if not listed:
        listed = [_LETTERS.get(one, one) for one in get(config, "hybrid_override_pattern", str)]
    if not 1 <= len(listed) <= MAX_LAYERS:
        raise BadConfig(
            f"layers_block_type or hybrid_override_pattern has {len(listed)} layers; 1 to "
            f"{MAX_LAYERS:,} are expected"
        )
    kinds = [_OLDER.get(str(kind), str(kind)) for kind in listed]
    for kind in kinds:
        if kind not in _KINDS:
            raise UnsupportedModel(
                f"layers_block_type or hybrid_override_pattern has a layer {kind[:64]!r}; only "
                f"{', '.join(map(repr, _KINDS))} are supported"
            )
    return kinds


def _num_layers(config: Config) -> JsonObject:
    return {"num_hidden_layers": len(_kinds(config))}


def _nemotron_h(config: Config) -> DecoderSpec:
    # transformers bounds steps of Mamba from below by `time_step_min` in prompts, but not in tokens
    # that follow: weft bounds neither, so that both are computed alike.
    require(config, "mamba_hidden_act", "silu")
    layers = {
        "mamba": LayerSpec(attends=False, state=read_mamba(config, _KEYS), mlp=None),
        "attention": LayerSpec(attention=AttentionSpec(rope=None), mlp=None),
        "mlp": LayerSpec(attends=False, mlp=_mlp(config)),
    }
    kinds = _kinds(config)
    if "moe" in kinds:
        layers["moe"] = LayerSpec(attends=False, mlp=_experts(config))
    names = replace(_NAMES.state, decay_is_final=flag(config, "decays_are_final"))
    return DecoderSpec(
        layers=tuple(layers[kind] for kind in kinds),
        names=replace(_NAMES, state=names),
    )


def _mlp(config: Config) -> MlpSpec:
    return MlpSpec(
        activation=activation(config, ("relu2",), "mlp_hidden_act"),
        is_gated=False,
        bias=flag(config, "mlp_bias"),
    )


def _experts(config: Config) -> MoeSpec:
    """Experts like those of DeepSeek V3, but without gates. They may read a projection of their
    input, which is refused."""
    require(config, "mlp_bias", False)
    if config.get("moe_latent_size") is not None:
        raise UnsupportedModel(
            f"moe_latent_size is {str(config['moe_latent_size'])[:64]}; experts that read a "
            "projection of their input are not supported"
        )
    spec = sigmoid_experts({"norm_topk_prob": True, **config, "hidden_act": "silu"})
    return replace(
        spec,
        activation=activation(config, ("relu2",), "mlp_hidden_act"),
        is_gated=False,
        shared_size=size(config, "moe_shared_expert_intermediate_size"),
    )


# GGUF files


def _gguf_latents(keys: ArchitectureKeys, found: Found) -> JsonObject:
    size = keys.number("moe_latent_size", int, 0)
    return {"moe_latent_size": size} if size else {}


_gguf_keys = gguf_mamba(_KEYS)


def _gguf_nemotron_h(keys: ArchitectureKeys, found: Found) -> JsonObject:
    return {
        **_gguf_keys(keys, found),
        "layers_block_type": found["layer_types"],
        "mlp_bias": keys.has("ffn_up.bias"),
    }


def _gguf_moe(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """With experts: the layers of one part that have a router have experts."""
    kinds = []
    for kind, is_routed in zip(
        found["layer_types"], keys.layers_with("ffn_gate_inp.weight"), strict=True
    ):
        kinds.append("moe" if is_routed else kind)
    return {
        **_gguf_nemotron_h(keys, found),
        "layers_block_type": kinds,
        "mlp_bias": keys.has("ffn_up_shexp.bias"),
    }


_gguf_nemotron_h_moe = gguf.experts(
    gguf.SIGMOID,
    {
        **gguf.CHOSEN,
        "n_routed_experts": gguf.GgufKey("expert_count", int),
        "moe_intermediate_size": gguf.SIZE,
        "moe_shared_expert_intermediate_size": gguf.GgufKey(
            "expert_shared_feed_forward_length", int
        ),
        "norm_topk_prob": gguf.GgufKey(gguf.NORMED, bool, True),
    },
    _gguf_moe,
    _gguf_latents,
    gguf.scaled,
    gguf.groups,
)

_GGUF_NAMES = {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
}


_GGUF_EXPERTS = {
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.up_proj",
    "ffn_down_exps": "mixer.experts.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
}


FAMILIES = {
    "NemotronH": Family(
        read=_nemotron_h,
        implied=_num_layers,
        defaults={"head_dim": 128, "num_key_value_heads": 8, "mamba_head_dim": 64, "n_groups": 8},
        norm_eps_key="layer_norm_epsilon",
        gguf={
            "nemotron_h": gguf.Architecture(
                more=_gguf_nemotron_h,
                has_gate=False,
                parts={**gguf_mamba_names("mixer"), **_GGUF_NAMES},
                outside={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
                layers="backbone.layers",
                flat=GGUF_MAMBA_FLAT,
                convs=gguf.STATE_CONVS,
                states=replace(GGUF_MAMBA, one_part=True),
            ),
            "nemotron_h_moe": gguf.Architecture(
                more=_gguf_nemotron_h_moe,
                reads=gguf.EXPERTS,
                has_gate=False,
                parts={**gguf_mamba_names("mixer"), **_GGUF_NAMES, **_GGUF_EXPERTS},
                outside={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
                layers="backbone.layers",
                flat=GGUF_MAMBA_FLAT,
                convs=gguf.STATE_CONVS,
                states=replace(GGUF_MAMBA, one_part=True),
            ),
        },
    ),
}

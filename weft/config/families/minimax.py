"""MiniMax Text-01 and M1: lightning attention in most layers, experts, and a residual stream that
is normed before each part. MiniMax M2: norms of all queries and of all keys."""

from __future__ import annotations

from weft.config.config_json import get, number, size
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    ExpertNames,
    LayerSpec,
    LightningSpec,
    MoeSpec,
    NormPosition,
    QkNorm,
    RopeConfig,
    RouterSpec,
    StateNames,
    TensorNames,
)
from weft.config.families import gguf
from weft.config.families.experts import checked, softmax_experts
from weft.config.families.family import (
    FULL,
    Config,
    Family,
    activation,
    flag,
    head_dim_of,
    layer_types,
    window,
)
from weft.config.families.rope import read_rope
from weft.config.families.states import LINEAR, check_lanes
from weft.config.model_errors import UnsupportedModel
from weft.json_types import JsonMapping, JsonObject

# The decays of lightning attention, which files of transformers have in tensors, too.
_DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


class _Residual:
    """The sum alpha x + beta f(x), as x + (beta / alpha) f(x): what follows is a norm, which sees
    of the common factor alpha nothing but that its eps becomes eps / alpha²."""

    def __init__(self, config: Config, part: str) -> None:
        self._alpha = number(config, f"{part}_alpha_factor", 1.0, above=0.0)
        self._eps = number(config, "rms_norm_eps", low=0.0)
        self.scale = number(config, f"{part}_beta_factor", 1.0, above=0.0) / self._alpha

    @property
    def next_eps(self) -> float:
        """Eps of the norm that follows."""
        return self._eps / self._alpha**2


def _minimax(config: Config) -> DecoderSpec:
    softmax = AttentionSpec(rope=_rope(config), window=window(config))
    experts = softmax_experts(config, inner="intermediate_size", is_normed=True)
    after_feed = _Residual(config, "mlp")
    layers = []
    for index, kind in enumerate(layer_types(config, _kind_of, (FULL, LINEAR))):
        is_linear = kind == LINEAR
        after_mix = _Residual(config, "linear_attn" if is_linear else "full_attn")
        layer = LayerSpec(
            attention=softmax,
            attends=not is_linear,
            state=_lightning(config, index) if is_linear else None,
            mlp=experts,
            norms=NormPosition.STREAM,
            residual_scale=after_mix.scale,
            feed_scale=after_feed.scale,
            mix_eps=after_feed.next_eps if index else 0.0,
            feed_eps=after_mix.next_eps,
        )
        layers.append(layer)
    names = TensorNames(
        mlp="block_sparse_moe",
        experts=ExpertNames(gate_up=("w1", "w3"), down="w2"),
        state=StateNames(mixer="self_attn", inputs=("qkv_proj", "output_gate")),
        unread=tuple(f"self_attn.{name}" for name in _DECAYS),
    )
    return DecoderSpec(layers=tuple(layers), names=names, last_eps=after_feed.next_eps)


def _kind_of(layer: int) -> str:
    """Of a file that does not say it, as transformers has it."""
    return LINEAR if layer % 2 else FULL


def _lightning(config: Config, layer: int) -> LightningSpec:
    heads = size(config, "num_attention_heads")
    head_dim = head_dim_of(config)
    check_lanes(head_dim, "head_dim")
    # The last layers forget slowest.
    last = size(config, "num_hidden_layers") - 1
    return LightningSpec(
        heads=heads,
        head_dim=head_dim,
        slope=1 - layer / (last + 1e-5) + 1e-5,
    )


def _rope(config: Config) -> RopeConfig:
    """The rotation. Released files have the rotated part of a head in `rotary_dim`."""
    rotation: JsonMapping = {}
    if config.get("rotary_dim") is not None:
        head_dim = size(config, "head_dim")
        rotation = {"partial_rotary_factor": size(config, "rotary_dim") / head_dim}
    return read_rope({**rotation, **config}, theta=1_000_000.0, is_partial=True)


def _minimax_text_01(config: Config) -> DecoderSpec:
    """The form in which MiniMax has released Text-01 and M1."""
    if not flag(config, "postnorm"):
        raise UnsupportedModel("postnorm is false; only true is supported")
    shared = get(config, "shared_intermediate_size", int, 0)
    if shared:
        raise UnsupportedModel(f"shared_intermediate_size is {shared}; only 0 is supported")
    return _minimax(config)


def _layer_types(config: Config) -> JsonMapping:
    """The kinds of layers: 0 in `attn_type_list` is lightning attention, 1 is softmax."""
    kinds = {0: LINEAR, 1: FULL}
    found = []
    for kind in get(config, "attn_type_list", list):
        if kind not in kinds:
            raise UnsupportedModel(f"attn_type_list has {str(kind)[:64]}; 0 and 1 are supported")
        found.append(kinds[kind])
    return {"layer_types": found}


def _minimax_m2(config: Config) -> DecoderSpec:
    router = RouterSpec(
        num_experts=size(config, "num_local_experts"),
        num_chosen=size(config, "num_experts_per_tok"),
        scores="sigmoid",
        is_normed=True,
        choice_bias=True,
    )
    head_dim = size(config, "head_dim")
    rotation = {"partial_rotary_factor": get(config, "rotary_dim", int, head_dim) / head_dim}
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope({**rotation, **config}, theta=5_000_000.0, is_partial=True),
            qk_norm=QkNorm.ALL_HEADS,
        ),
        mlp=MoeSpec(
            router=checked(router),
            size=size(config, "intermediate_size"),
            activation=activation(config),
        ),
    )
    names = TensorNames(
        mlp="block_sparse_moe",
        experts=ExpertNames(
            choice_bias="e_score_correction_bias",
            gate_up=("w1", "w3"),
            down="w2",
        ),
    )
    return DecoderSpec(layers=(layer,), names=names)


_gguf_minimax_m2 = gguf.experts(
    gguf.SIGMOID,
    {
        **gguf.CHOSEN,
        "num_local_experts": gguf.GgufKey("expert_count", int),
        "intermediate_size": gguf.SIZE,
    },
)

_gguf_experts = gguf.experts(
    gguf.SOFTMAX,
    {**gguf.CHOSEN, "num_local_experts": gguf.GgufKey("expert_count", int)},
)


def _gguf_minimax(keys: gguf.ArchitectureKeys, found: gguf.Found) -> JsonObject:
    """Text-01 and M1. A file has one factor of the residual stream; those of the parts are 1."""
    alpha = gguf.factor("residual_scale", keys)
    parts = ("full_attn", "linear_attn", "mlp")
    return {f"{part}_alpha_factor": alpha for part in parts} | _gguf_experts(keys, found)


def _num_inputs(config: gguf.Found) -> int:
    """Queries, keys and values of lightning attention."""
    return 3 * int(config["num_attention_heads"]) * int(config["head_dim"])


_GGUF_STATES = gguf.StateLayers(
    tensor="attn_norm_2.weight",
    kind=LINEAR,
    parts={
        "attn_qkv": "self_attn.qkv_proj",
        "attn_gate": "self_attn.output_gate",
        "attn_norm_2": "self_attn.norm",
        "attn_output": "self_attn.out_proj",
    },
    inputs=("attn_qkv.weight", _num_inputs),
)
_DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
_RELEASED = Family(
    read=_minimax_text_01,
    defaults=_DEFAULTS,
    aliases={
        "full_attn_alpha_factor": "layernorm_full_attention_alpha",
        "full_attn_beta_factor": "layernorm_full_attention_beta",
        "linear_attn_alpha_factor": "layernorm_linear_attention_alpha",
        "linear_attn_beta_factor": "layernorm_linear_attention_beta",
        "mlp_alpha_factor": "layernorm_mlp_alpha",
        "mlp_beta_factor": "layernorm_mlp_beta",
    },
    implied=_layer_types,
)
FAMILIES = {
    "MiniMax": Family(
        read=_minimax,
        defaults=_DEFAULTS,
        gguf={
            "minimax-01": gguf.Architecture(
                more=_gguf_minimax,
                reads=(*gguf.EXPERTS, "residual_scale"),
                is_partial=True,
                parts=gguf.MIXTRAL_NAMES,
                states=_GGUF_STATES,
            )
        },
    ),
    "MiniMaxText01": _RELEASED,
    "MiniMaxM1": _RELEASED,
    "MiniMaxM2": Family(
        read=_minimax_m2,
        defaults={"head_dim": 128},
        gguf={
            "minimax-m2": gguf.Architecture(
                more=_gguf_minimax_m2,
                reads=gguf.EXPERTS,
                is_partial=True,
                parts={
                    **gguf.MIXTRAL_NAMES,
                    "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
                },
            )
        },
    ),
}

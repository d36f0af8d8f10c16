"""Translates the keys of a GGUF file that only one architecture has into keys of a `config.json`:
one function per architecture. Knows neither tensors nor names of architectures
(`gguf_architectures.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from weft.config.model_errors import UnsupportedModel
from weft.json_types import JsonObject

T = TypeVar("T")
Found = Mapping[str, Any]  # the part of a `config.json` that all architectures have


class ArchitectureKeys(Protocol):
    """The keys of a file's architecture."""

    def number(self, key: str, kind: type[T], default: T | None = None) -> T: ...

    def flags(self, key: str) -> list[bool]:
        """One flag per layer; empty if the file does not have the key."""
        ...

    def numbers(self, key: str) -> list[int]:
        """The number of each layer; the file has one for all, or a list."""
        ...

    def layers_with(self, tensor: str) -> list[bool]:
        """For each layer, whether it has a tensor of this name."""
        ...

    def has(self, tensor: str) -> bool:
        """Whether a layer has a tensor of this name."""
        ...

    def short_and_long_factors(self) -> tuple[Sequence[float], Sequence[float]]:
        """The divisors of the rotary frequencies for short and for long contexts; each empty if the
        file does not have it."""
        ...

    def full(self, key: str) -> str:
        """The key with the name of the architecture, for errors."""
        ...


Reader: TypeAlias = Callable[[ArchitectureKeys, Found], JsonObject]


class GgufKey(NamedTuple):
    """A key of a GGUF file, and its value if a file does not have it."""

    name: str
    kind: type
    default: Any = None  # None: the key is required
    like: str = ""  # in place of a default: the key of `config.json` that has the value


def said(keys: ArchitectureKeys, found: Found, wanted: Mapping[str, GgufKey]) -> JsonObject:
    """The values of the wanted keys, under the keys of `config.json`."""
    values = {}
    for name, key in wanted.items():
        default = found[key.like] if key.like else key.default
        values[name] = keys.number(key.name, key.kind, default)
    return values


def nothing(keys: ArchitectureKeys, found: Found) -> JsonObject:
    return {}


def _whole(key: str, keys: ArchitectureKeys) -> float:
    """A factor; 0 in a file means that there is none."""
    return keys.number(key, float, 0.0) or 1.0


def llama(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Llama; with experts, Mixtral."""
    if keys.number("expert_count", int, 0):
        return mixtral(keys, found)
    window = keys.number("attention.sliding_window", int, 0)
    if not window:
        return {}
    return {"architectures": ["MistralForCausalLM"], "sliding_window": window}


def gemma(keys: ArchitectureKeys, found: Found) -> JsonObject:
    # Converters have added 1 to the weights of norms.
    return {"norm_weights_are_whole": True}


def gemma2(keys: ArchitectureKeys, found: Found) -> JsonObject:
    return {
        **gemma(keys, found),
        "query_pre_attn_scalar": _query_scalar(found, largest=46),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", float, 30.0),
        "sliding_window": keys.number("attention.sliding_window", int, 4_096),
    }


def gemma3(keys: ArchitectureKeys, found: Found) -> JsonObject:
    rope = dict(found["rope_parameters"])
    rope["rope_theta"] = keys.number("rope.freq_base", float, 1_000_000.0)
    near = {
        "rope_type": "default",
        "rope_theta": keys.number("rope.freq_base_swa", float, 10_000.0),
    }
    return {
        **gemma(keys, found),
        "query_pre_attn_scalar": _query_scalar(found, largest=62),
        "final_logit_softcapping": keys.number("final_logit_softcapping", float, 0.0),
        "sliding_window": keys.number("attention.sliding_window", int, 1_024),
        "sliding_window_pattern": keys.number("attention.sliding_window_pattern", int, 6),
        "rope_parameters": {"full_attention": rope, "sliding_attention": near},
    }


def gemma4(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Gemma 4. The sizes of a head that all architectures have are those of layers that see all
    tokens."""
    has_scalars = keys.has("layer_output_scale.weight")
    head_dim = keys.number("attention.key_length_swa", int, found["head_dim"])
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        other = keys.number(key, int, head_dim)
        if other != head_dim:
            raise UnsupportedModel(
                f"{keys.full(key)} is {other}, but heads with windows have {head_dim} values; "
                "other values and partly rotated heads are not supported"
            )
    kinds = ["sliding_attention"] * found["num_hidden_layers"]
    for layer, has_window in enumerate(keys.flags("attention.sliding_window_pattern")):
        if not has_window:
            kinds[layer] = "full_attention"
    return {
        **_gemma4_heads(keys, found, head_dim, kinds),
        **_gemma4_feed_forward(keys, found),
        "layer_types": kinds,
        "sliding_window": keys.number(_WINDOW, int, 512),
        "num_kv_shared_layers": keys.number("attention.shared_kv_layers", int, 0),
        "hidden_size_per_layer_input": keys.number("embedding_length_per_layer_input", int, 0),
        "layers_have_scalars": has_scalars,
        "final_logit_softcapping": keys.number("final_logit_softcapping", float, 0.0),
        "rope_parameters": {
            "full_attention": found["rope_parameters"],
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": keys.number("rope.freq_base_swa", float, 10_000.0),
            },
        },
    }


def _gemma4_heads(
    keys: ArchitectureKeys, found: Found, head_dim: int, kinds: Sequence[str]
) -> JsonObject:
    kv_heads = keys.numbers("attention.head_count_kv")
    by_layer = {}
    for layer, kind in enumerate(kinds):
        size = head_dim if kind == "sliding_attention" else found["head_dim"]
        by_layer[str(layer)] = {"head_dim": size, "num_key_value_heads": kv_heads[layer]}
    # In layers that see all tokens, a file without values has them in the keys.
    has_values = keys.layers_with("attn_v.weight")
    is_full = [kind == "full_attention" for kind in kinds]
    values_are_keys = any(is_full) and not has_values[is_full.index(True)]
    return {
        "head_dim": head_dim,
        "num_key_value_heads": kv_heads[0],
        "per_layer_config": by_layer,
        "attention_k_eq_v": values_are_keys,
    }


def _gemma4_feed_forward(keys: ArchitectureKeys, found: Found) -> JsonObject:
    sizes = keys.numbers("feed_forward_length")
    num_shared = keys.number("attention.shared_kv_layers", int, 0)
    # Layers that read the K and V of others may have twice the size.
    is_double = num_shared > 0 and sizes[-1] == 2 * sizes[0]
    num_own = len(sizes) - num_shared
    expected = [sizes[0]] * num_own + [sizes[-1]] * num_shared
    if sizes != expected or (sizes[-1] != sizes[0] and not is_double):
        raise UnsupportedModel(
            f"{keys.full('feed_forward_length')} is {sizes}; supported is one size, or twice the "
            f"size in the last {num_shared} layers"
        )
    values: JsonObject = {"intermediate_size": sizes[0], "use_double_wide_mlp": is_double}
    if not keys.number("expert_count", int, 0):
        return values
    wanted = {
        "num_experts": GgufKey("expert_count", int),
        "top_k_experts": GgufKey("expert_used_count", int),
        "moe_intermediate_size": _SIZE,
    }
    return {**values, **said(keys, found, wanted), "enable_moe_block": True}


def _query_scalar(found: Found, largest: int) -> int:
    """The scale of queries, which files do not contain. The largest model of a release (27B), with
    `largest` layers, scales scores by hidden size / number of heads; the other models by the size
    of a head."""
    if found["num_hidden_layers"] == largest:
        return int(found["hidden_size"] // found["num_attention_heads"])
    return int(found["head_dim"])


def granite(keys: ArchitectureKeys, found: Found) -> JsonObject:
    if not _has_positions(keys):
        raise UnsupportedModel(
            f"{keys.full('rope.scaling.finetuned')} is false: without positions, Granite is not "
            "supported as a GGUF file"
        )
    return _granite_factors(keys, found)


def _has_positions(keys: ArchitectureKeys) -> bool:
    """Whether queries and keys have positions, by the key of Granite's files."""
    return keys.number("rope.scaling.finetuned", bool, True)


def _granite_factors(keys: ArchitectureKeys, found: Found) -> JsonObject:
    scale = keys.number("attention.scale", float, 0.0)
    return {
        "embedding_multiplier": _whole("embedding_scale", keys),
        "residual_multiplier": _whole("residual_scale", keys),
        "attention_multiplier": scale or found["head_dim"] ** -0.5,
        "logits_scaling": _whole("logit_scale", keys),
    }


def olmo2(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """OLMo 2, or OLMo 3, which has the same name, and windows; its layers with a window rotate
    without scaling."""
    window = keys.number("attention.sliding_window", int, 0)
    if not window:
        return {}
    rope = found["rope_parameters"]
    near = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "rope_parameters": {"full_attention": rope, "sliding_attention": near},
    }


def cohere(keys: ArchitectureKeys, found: Found) -> JsonObject:
    return {"logit_scale": _whole("logit_scale", keys)}


def cohere2(keys: ArchitectureKeys, found: Found) -> JsonObject:
    window = keys.number("attention.sliding_window", int, 4_096)
    return {**cohere(keys, found), "sliding_window": window}


def biases(keys: ArchitectureKeys, found: Found) -> JsonObject:
    return {"use_bias": found["attention_bias"], "use_qkv_bias": found["attention_bias"]}


def starcoder2(keys: ArchitectureKeys, found: Found) -> JsonObject:
    window = keys.number("attention.sliding_window", int, 0)
    return {**biases(keys, found), "sliding_window": window}


def stablelm(keys: ArchitectureKeys, found: Found) -> JsonObject:
    is_parallel = keys.number("use_parallel_residual", bool, False)
    return {**biases(keys, found), "use_parallel_residual": is_parallel}


def gpt_neox(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """GPT-NeoX. Converters have put the queries of all heads first, then their keys, then their
    values."""
    return {
        "heads_are_apart": True,
        "hidden_act": "gelu",
        "use_parallel_residual": keys.number("use_parallel_residual", bool, True),
    }


def phi3(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Phi-3. A file has two lists of factors if the context of the model was extended."""
    more: JsonObject = {"sliding_window": keys.number("attention.sliding_window", int, 0)}
    short, long = keys.short_and_long_factors()
    if not long:
        return more
    original = keys.number("rope.scaling.original_context_length", int)
    rope = {
        "rope_type": "longrope",
        "rope_theta": keys.number("rope.freq_base", float, 10_000.0),
        "short_factor": list(short),
        "long_factor": list(long),
        "original_max_position_embeddings": original,
        "attention_factor": keys.number("rope.scaling.attn_factor", float, 1.0),
    }
    return {**more, "rope_parameters": rope, "original_max_position_embeddings": original}


def nemotron(keys: ArchitectureKeys, found: Found) -> JsonObject:
    # Converters have added 1 to the weights of norms.
    return {"norm_weights_are_whole": True, "hidden_act": "relu2"}


def exaone4(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """EXAONE 4. Files of the first release's model with 64 layers do not contain its windows."""
    of_32b = found["num_hidden_layers"] == 64
    window = keys.number("attention.sliding_window", int, 4_096 if of_32b else 0)
    more: JsonObject = {"sliding_window": window}
    has_window = keys.flags("attention.sliding_window_pattern")
    if window and has_window:
        kinds = {True: "sliding_attention", False: "full_attention"}
        more["layer_types"] = [kinds[each] for each in has_window]
    return more


def mistral3(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Ministral 3, if queries grow with their position; else Mistral."""
    growth = keys.number("attention.temperature_scale", float, 0.0)
    if not growth:
        return llama(keys, found)
    rope = {**found["rope_parameters"], "llama_4_scaling_beta": growth}
    mscale = keys.number("rope.scaling.yarn_log_multiplier", float, 0.0)
    if mscale:
        rope |= {"mscale": mscale, "mscale_all_dim": mscale}
    return {"architectures": ["Ministral3ForCausalLM"], "rope_parameters": rope}


# Experts

SOFTMAX = 1
SIGMOID = 2
SOFTMAX_OF_CHOSEN = 3
_CHOSEN = {"num_experts_per_tok": GgufKey("expert_used_count", int)}
_COUNTS = {"num_experts": GgufKey("expert_count", int), **_CHOSEN}
_SIZE = GgufKey("expert_feed_forward_length", int, like="intermediate_size")
_WINDOW = "attention.sliding_window"
_NORMED = "expert_weights_norm"


def experts(scores: int, wanted: Mapping[str, GgufKey], *others: Reader) -> Reader:
    """The reader of an architecture with experts that are chosen by these scores. `others` read its
    further keys."""

    def read(keys: ArchitectureKeys, found: Found) -> JsonObject:
        kind = keys.number("expert_gating_func", int, scores)
        if kind not in (0, scores):
            raise UnsupportedModel(
                f"{keys.full('expert_gating_func')} is {kind}; {scores} is supported"
            )
        values = said(keys, found, wanted)
        for other in others:
            values |= other(keys, found)
        return values

    return read


def expert_size(keys: ArchitectureKeys, found: Found) -> int:
    """The inner size of an expert."""
    return int(said(keys, found, {"size": _SIZE})["size"])


def _is_mixtral(keys: ArchitectureKeys, found: Found) -> JsonObject:
    return {"architectures": ["MixtralForCausalLM"]}


def _qkv_bias(keys: ArchitectureKeys, found: Found) -> JsonObject:
    return {"qkv_bias": found["attention_bias"]}


def _scaled(keys: ArchitectureKeys, found: Found) -> JsonObject:
    return {"routed_scaling_factor": _whole("expert_weights_scale", keys)}


def _gpt_oss(keys: ArchitectureKeys, found: Found) -> JsonObject:
    rope = {**found["rope_parameters"], "truncate": False}
    return {"gates_and_ups_are_apart": True, "rope_parameters": rope}


def _granite_experts(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Granite with experts; with a shared part it is another class."""
    size = keys.number("expert_shared_feed_forward_length", int, 0)
    values: JsonObject = {"gates_and_ups_are_apart": True}
    if size:
        values["architectures"] = ["GraniteMoeSharedForCausalLM"]
        values["shared_intermediate_size"] = size
    return values


def _groups(keys: ArchitectureKeys, found: Found) -> JsonObject:
    wanted = {
        "n_group": GgufKey("expert_group_count", int, 1),
        "topk_group": GgufKey("expert_group_used_count", int, 1),
    }
    # Files have 0 for one group.
    return {name: max(num, 1) for name, num in said(keys, found, wanted).items()}


mixtral = experts(
    SOFTMAX,
    {**_COUNTS, "intermediate_size": _SIZE, "sliding_window": GgufKey(_WINDOW, int, 0)},
    _is_mixtral,
)
olmoe = experts(
    SOFTMAX,
    {**_COUNTS, "intermediate_size": _SIZE, "norm_topk_prob": GgufKey(_NORMED, bool, False)},
)
qwen2_moe = experts(
    SOFTMAX,
    {
        **_COUNTS,
        "moe_intermediate_size": _SIZE,
        "shared_expert_intermediate_size": GgufKey(
            "expert_shared_feed_forward_length", int, like="intermediate_size"
        ),
        "norm_topk_prob": GgufKey(_NORMED, bool, False),
    },
    _qkv_bias,
)
qwen3_moe = experts(
    SOFTMAX,
    {**_COUNTS, "moe_intermediate_size": _SIZE, "norm_topk_prob": GgufKey(_NORMED, bool, True)},
)
gpt_oss = experts(
    SOFTMAX_OF_CHOSEN,
    {**_COUNTS, "intermediate_size": _SIZE, "sliding_window": GgufKey(_WINDOW, int, 128)},
    _gpt_oss,
)
# Softmax of all with weights that sum to 1 is the same as softmax of the chosen.
granite_moe = experts(SOFTMAX, {**_COUNTS, "intermediate_size": _SIZE}, _granite_experts, granite)
# GLM 4.5, dots 1: experts like those of DeepSeek V3.
sigmoid_experts = experts(
    SIGMOID,
    {
        **_CHOSEN,
        "n_routed_experts": GgufKey("expert_count", int),
        "moe_intermediate_size": _SIZE,
        "n_shared_experts": GgufKey("expert_shared_count", int, 0),
        "first_k_dense_replace": GgufKey("leading_dense_block_count", int, 0),
        "norm_topk_prob": GgufKey(_NORMED, bool, False),
    },
    _scaled,
    _groups,
)
minimax_m2 = experts(
    SIGMOID,
    {**_CHOSEN, "num_local_experts": GgufKey("expert_count", int), "intermediate_size": _SIZE},
)
ernie_moe = experts(
    SOFTMAX,
    {
        "moe_num_experts": GgufKey("expert_count", int),
        "moe_k": GgufKey("expert_used_count", int),
        "moe_intermediate_size": _SIZE,
        "moe_num_shared_experts": GgufKey("expert_shared_count", int, 0),
        "moe_layer_start_index": GgufKey("leading_dense_block_count", int, 0),
        "moe_layer_interval": GgufKey("interleave_moe_layer_step", int, 1),
    },
    biases,
)


# Layers that keep a state


def lfm2(keys: ArchitectureKeys, found: Found) -> JsonObject:
    # Files have the final size of the feed-forward part.
    wanted = {"conv_L_cache": GgufKey("shortconv.l_cache", int)}
    return {**said(keys, found, wanted), "block_auto_adjust_ff_dim": False}


def _choice_bias(keys: ArchitectureKeys, found: Found) -> JsonObject:
    return {"use_expert_bias": keys.has("exp_probs_b.bias")}


lfm2_moe = experts(
    SIGMOID,
    {
        **_COUNTS,
        "moe_intermediate_size": _SIZE,
        "num_dense_layers": GgufKey("leading_dense_block_count", int, 0),
        "norm_topk_prob": GgufKey(_NORMED, bool, True),
    },
    lfm2,
    _choice_bias,
    _scaled,
)


def gated_delta(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Qwen3-Next and Qwen3.5. Converters have added 1 to the weights of norms, and written the
    decay -exp(A_log) instead of A_log."""
    wanted = {
        "linear_num_key_heads": GgufKey("ssm.group_count", int),
        "linear_num_value_heads": GgufKey("ssm.time_step_rank", int),
        "linear_key_head_dim": GgufKey("ssm.state_size", int),
        "linear_conv_kernel_dim": GgufKey("ssm.conv_kernel", int),
    }
    values = said(keys, found, wanted)
    inner_size = keys.number("ssm.inner_size", int)
    num_heads = values["linear_num_value_heads"]
    if num_heads < 1 or inner_size % num_heads:
        raise UnsupportedModel(
            f"{keys.full('ssm.inner_size')} is {inner_size}; it must be a multiple of "
            f"{keys.full('ssm.time_step_rank')}, which is {num_heads}"
        )
    return {
        **values,
        "linear_value_head_dim": inner_size // num_heads,
        "norm_weights_are_whole": True,
        "decays_are_whole": True,
    }


def mamba(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Mamba 2. Converters have written the decay -exp(A_log) instead of A_log."""
    wanted = {
        "mamba_n_heads": GgufKey("ssm.time_step_rank", int),
        "mamba_n_groups": GgufKey("ssm.group_count", int),
        "mamba_d_state": GgufKey("ssm.state_size", int),
        "mamba_d_conv": GgufKey("ssm.conv_kernel", int),
    }
    inner_size = keys.number("ssm.inner_size", int)
    if inner_size % found["hidden_size"]:
        raise UnsupportedModel(
            f"{keys.full('ssm.inner_size')} is {inner_size}; it must be a multiple of "
            f"{keys.full('embedding_length')}, which is {found['hidden_size']}"
        )
    return {
        **said(keys, found, wanted),
        "mamba_expand": inner_size // found["hidden_size"],
        "mamba_conv_bias": keys.has("ssm_conv1d.bias"),
        "mamba_proj_bias": keys.has("ssm_in.bias"),
        "decays_are_whole": True,
    }


def granite_hybrid(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Granite 4. The result has the size of the shared part, even if there are no experts."""
    wanted = {
        "num_local_experts": GgufKey("expert_count", int, 0),
        "num_experts_per_tok": GgufKey("expert_used_count", int, 0),
        "shared_intermediate_size": GgufKey(
            "expert_shared_feed_forward_length", int, like="intermediate_size"
        ),
    }
    values = said(keys, found, wanted)
    if not values["num_local_experts"]:
        values["intermediate_size"] = values["shared_intermediate_size"]
    return {
        **values,
        **_granite_factors(keys, found),
        **mamba(keys, found),
        "position_embedding_type": "rope" if _has_positions(keys) else "nope",
        "gates_and_ups_are_apart": True,
    }


def qwen3_5(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Qwen3.5. Converters have put the first value head of every key head before the second."""
    return {**gated_delta(keys, found), "value_heads_are_tiled": True}


def _linear_inputs(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Qwen3-Next. Files of the first converter have one tensor, like the model's own files."""
    return {"linear_inputs_are_apart": keys.has("attn_gate.weight")}


_QWEN_EXPERTS = {
    **_COUNTS,
    "moe_intermediate_size": _SIZE,
    "shared_expert_intermediate_size": GgufKey("expert_shared_feed_forward_length", int),
    "norm_topk_prob": GgufKey(_NORMED, bool, True),
}
qwen3_next = experts(SOFTMAX, _QWEN_EXPERTS, gated_delta, _linear_inputs)
qwen3_5_moe = experts(SOFTMAX, _QWEN_EXPERTS, qwen3_5)

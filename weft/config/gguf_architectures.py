"""What each architecture of GGUF files is beyond what all have: its class, its keys, and how it
names tensors. Said as `config.json` says it; `config/gguf.py` reads what all have.

Rows of queries and keys stand in a file in the order in which llama.cpp rotates them. Where that is
pairs side by side, but transformers' order is halves, they are put into halves (`has_pairs`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Found = Mapping[str, Any]  # the part of a `config.json` that all architectures have

RMS_EPS = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")  # of GGUF, of config.json


class ArchitectureKeys(Protocol):
    """The keys of a file's architecture."""

    def number(self, key: str, kind: type[T], default: T | None = None) -> T: ...


def _nothing(keys: ArchitectureKeys, found: Found) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    name: str  # of the class in a `config.json`
    more: Callable[[ArchitectureKeys, Found], dict[str, Any]] = _nothing
    reads: tuple[str, ...] = ()  # keys that change what is computed, and that `more` reads
    norm_eps: tuple[str, str] = RMS_EPS
    has_pairs: bool = False
    has_gate: bool = True
    is_partial: bool = False  # a part of each head may rotate
    # Tensors of a layer that are called otherwise than those of Llama, and what weft calls them.
    parts: Mapping[str, str] = field(default_factory=dict)


def _whole(key: str, keys: ArchitectureKeys) -> float:
    """A factor, of which 0 says that there is none."""
    return keys.number(key, float, 0.0) or 1.0


def _llama(keys: ArchitectureKeys, found: Found) -> dict[str, Any]:
    window = keys.number("attention.sliding_window", int, 0)
    if not window:
        return {}
    return {"architectures": ["MistralForCausalLM"], "sliding_window": window}


def _gemma(keys: ArchitectureKeys, found: Found) -> dict[str, Any]:
    # Converters have added 1 to the weights of norms.
    return {"norm_weights_are_whole": True}


def _gemma2(keys: ArchitectureKeys, found: Found) -> dict[str, Any]:
    return {
        **_gemma(keys, found),
        "query_pre_attn_scalar": _query_scalar(found, largest=46),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", float, 30.0),
        "sliding_window": keys.number("attention.sliding_window", int, 4_096),
    }


def _gemma3(keys: ArchitectureKeys, found: Found) -> dict[str, Any]:
    rope = dict(found["rope_parameters"])
    rope["rope_theta"] = keys.number("rope.freq_base", float, 1_000_000.0)
    near = {
        "rope_type": "default",
        "rope_theta": keys.number("rope.freq_base_swa", float, 10_000.0),
    }
    return {
        **_gemma(keys, found),
        "query_pre_attn_scalar": _query_scalar(found, largest=62),
        "final_logit_softcapping": keys.number("final_logit_softcapping", float, 0.0),
        "sliding_window": keys.number("attention.sliding_window", int, 1_024),
        "sliding_window_pattern": keys.number("attention.sliding_window_pattern", int, 6),
        "rope_parameters": {"full_attention": rope, "sliding_attention": near},
    }


def _query_scalar(found: Found, largest: int) -> int:
    """Files do not say it. The largest model of a release (27B), which has so many layers, scales
    scores by the share of a head in the hidden size; the others by the size of a head."""
    if found["num_hidden_layers"] == largest:
        return int(found["hidden_size"] // found["num_attention_heads"])
    return int(found["head_dim"])


def _granite(keys: ArchitectureKeys, found: Found) -> dict[str, Any]:
    scale = keys.number("attention.scale", float, 0.0)
    return {
        "embedding_multiplier": _whole("embedding_scale", keys),
        "residual_multiplier": _whole("residual_scale", keys),
        "attention_multiplier": scale or found["head_dim"] ** -0.5,
        "logits_scaling": _whole("logit_scale", keys),
    }


def _olmo2(keys: ArchitectureKeys, found: Found) -> dict[str, Any]:
    """OLMo 3 has the name of OLMo 2, and windows; layers with a window rotate without scaling."""
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


def _cohere(keys: ArchitectureKeys, found: Found) -> dict[str, Any]:
    return {"logit_scale": _whole("logit_scale", keys)}


def _cohere2(keys: ArchitectureKeys, found: Found) -> dict[str, Any]:
    window = keys.number("attention.sliding_window", int, 4_096)
    return {**_cohere(keys, found), "sliding_window": window}


def _biases(keys: ArchitectureKeys, found: Found) -> dict[str, Any]:
    return {"use_bias": found["attention_bias"], "use_qkv_bias": found["attention_bias"]}


def _starcoder2(keys: ArchitectureKeys, found: Found) -> dict[str, Any]:
    window = keys.number("attention.sliding_window", int, 0)
    return {**_biases(keys, found), "sliding_window": window}


def _stablelm(keys: ArchitectureKeys, found: Found) -> dict[str, Any]:
    is_parallel = keys.number("use_parallel_residual", bool, False)
    return {**_biases(keys, found), "use_parallel_residual": is_parallel}


_FACTORS = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
_NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_NORMS = {**_NORMS_BEHIND, "ffn_norm": "pre_feedforward_layernorm"}
ARCHITECTURES = {
    # "llama" is also Mistral, SmolLM, and whatever else computes as Llama does.
    "llama": Architecture(name="LlamaForCausalLM", more=_llama, has_pairs=True),
    "qwen2": Architecture(name="Qwen2ForCausalLM"),
    "qwen3": Architecture(name="Qwen3ForCausalLM"),
    "gemma": Architecture(name="GemmaForCausalLM", more=_gemma),
    "gemma2": Architecture(
        name="Gemma2ForCausalLM",
        more=_gemma2,
        reads=("attn_logit_softcapping", "final_logit_softcapping"),
        parts=_GEMMA_NORMS,
    ),
    "gemma3": Architecture(
        name="Gemma3ForCausalLM",
        more=_gemma3,
        reads=("final_logit_softcapping",),
        parts=_GEMMA_NORMS,
    ),
    "granite": Architecture(
        name="GraniteForCausalLM",
        more=_granite,
        reads=_FACTORS,
        has_pairs=True,
    ),
    # The file has the factors that follow from the sizes: those are Granite's.
    "minicpm": Architecture(
        name="GraniteForCausalLM",
        more=_granite,
        reads=_FACTORS,
        has_pairs=True,
    ),
    "smollm3": Architecture(name="SmolLM3ForCausalLM", has_pairs=True),
    "arcee": Architecture(name="ArceeForCausalLM", has_pairs=True, has_gate=False),
    "olmo2": Architecture(name="Olmo2ForCausalLM", more=_olmo2, parts=_NORMS_BEHIND),
    "seed_oss": Architecture(
        name="SeedOssForCausalLM",
        parts={"post_attention_norm": "post_attention_layernorm"},
    ),
    "ernie4_5": Architecture(name="Ernie4_5ForCausalLM", more=_biases),
    "command-r": Architecture(
        name="CohereForCausalLM",
        more=_cohere,
        reads=("logit_scale",),
        norm_eps=("attention.layer_norm_epsilon", "layer_norm_eps"),
    ),
    "cohere2": Architecture(
        name="Cohere2ForCausalLM",
        more=_cohere2,
        reads=("logit_scale",),
        norm_eps=("attention.layer_norm_epsilon", "layer_norm_eps"),
    ),
    "starcoder2": Architecture(
        name="Starcoder2ForCausalLM",
        more=_starcoder2,
        norm_eps=("attention.layer_norm_epsilon", "norm_epsilon"),
        has_gate=False,
        parts={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "stablelm": Architecture(
        name="StableLmForCausalLM",
        more=_stablelm,
        reads=("use_parallel_residual",),
        norm_eps=("attention.layer_norm_epsilon", "layer_norm_eps"),
        is_partial=True,
    ),
}

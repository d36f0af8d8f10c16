"""GGUF files: what a family says of those that contain its models, and readers of keys that several
families share. `config/gguf.py` reads the keys that all architectures have.

A file has the rows of queries and keys in the order in which llama.cpp rotates them. If that order
is adjacent pairs, but transformers' order is halves, weft reorders them into halves (`has_pairs`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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

    def num_rows(self, tensor: str) -> int:
        """The number of rows of a tensor outside of the layers, by its full name."""
        ...

    def short_and_long_factors(self) -> tuple[Sequence[float], Sequence[float]]:
        """The divisors of the rotary frequencies for short and for long contexts; each empty if the
        file does not have it."""
        ...

    def full(self, key: str) -> str:
        """The key with the name of the architecture, for errors."""
        ...

    def note_name(self, name: str, key: str) -> None:
        """The value of `name` in the `config.json` is that of `key`, for errors."""
        ...


# Translates the keys that only one architecture has into keys of a `config.json`.
Reader: TypeAlias = Callable[[ArchitectureKeys, Found], JsonObject]


def nothing(keys: ArchitectureKeys, found: Found) -> JsonObject:
    return {}


@dataclass(frozen=True, kw_only=True)
class StateLayers:
    """The layers that keep a state: they are the layers with this tensor. The others have
    attention."""

    tensor: str
    kind: str  # in "layer_types"
    attention_has_gate: bool = False  # in the other layers, a gate follows each query head
    with_attention: bool = False  # these layers have attention, too
    # Layers have one part each: a state, attention, or, without both, a feed-forward part.
    one_part: bool = False
    # Names of tensors that differ in these layers from those of the other layers.
    parts: Mapping[str, str] = field(default_factory=dict)
    # The tensor of a mixer's inputs, and its number of rows by the `config.json`.
    inputs: tuple[str, Callable[[Found], int]] | None = None


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The files of one architecture: their own keys, and names of tensors that differ from those of
    Llama's files."""

    more: Reader = nothing
    reads: tuple[str, ...] = ()  # keys that change the computation, and that `more` reads
    norm_eps: str = "attention.layer_norm_rms_epsilon"
    has_pairs: bool = False
    has_gate: bool = True
    is_partial: bool = False  # only a part of each head may rotate
    has_gate_in_up: bool = False  # one tensor has gates before ups
    splits_qkv: bool = False  # weft splits one tensor of queries, keys and values into three
    has_qk_norm: bool = False  # "use_qk_norm" says whether the file has the weights of this norm
    # Tensors of a layer whose names differ from Llama's → weft's names; a key with ".weight" or
    # ".bias" is a whole name.
    parts: Mapping[str, str] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=dict)  # the same for tensors outside layers
    layers: str = "model.layers"
    rows: tuple[str, ...] = ()  # vectors that weft reads as matrices of one row
    flat: tuple[str, ...] = ()  # matrices that weft reads as vectors
    joined: tuple[str, ...] = ()  # tensors [heads, n, m] that weft reads as [heads * n, m]
    # Attention by latents: the sizes of heads are those of what is in the cache.
    is_latent: bool = False
    convs: tuple[str, ...] = ()  # matrices [n, m] that weft reads as [n, 1, m]
    states: StateLayers | None = None
    by_layer: tuple[str, ...] = ()  # keys with a number for each layer, which `more` reads


LAYER_NORM_EPS = "attention.layer_norm_epsilon"
FACTORS = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
EXPERTS = ("expert_count", "expert_group_count", "expert_weights_scale")
NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# The name says "after attention"; the norm is before the feed-forward part.
MLP_NORM = {"post_attention_norm": "post_attention_layernorm"}
MIXTRAL_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}
STATE_CONVS = ("ssm_conv1d.weight",)
MLP = "mlp"  # in "layer_types": a layer that has only this part


# Readers


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
        keys.note_name(name, key.name)
    return values


def factor(key: str, keys: ArchitectureKeys) -> float:
    """A factor; 0 in a file means that there is none."""
    return keys.number(key, float, 0.0) or 1.0


def by_windows(keys: ArchitectureKeys) -> list[str]:
    """The kind of each layer, by the flags of those with a window; empty if a file has none."""
    kinds = {True: "sliding_attention", False: "full_attention"}
    return [kinds[has_window] for has_window in keys.flags(WINDOWS)]


def biases(keys: ArchitectureKeys, found: Found) -> JsonObject:
    return {"use_bias": found["attention_bias"], "use_qkv_bias": found["attention_bias"]}


# Experts

SOFTMAX = 1
SIGMOID = 2
SOFTMAX_OF_CHOSEN = 3
CHOSEN = {"num_experts_per_tok": GgufKey("expert_used_count", int)}
COUNTS = {"num_experts": GgufKey("expert_count", int), **CHOSEN}
SIZE = GgufKey("expert_feed_forward_length", int, like="intermediate_size")
WINDOW = "attention.sliding_window"
WINDOWS = "attention.sliding_window_pattern"
NORMED = "expert_weights_norm"


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
    return int(said(keys, found, {"size": SIZE})["size"])


def scaled(keys: ArchitectureKeys, found: Found) -> JsonObject:
    return {"routed_scaling_factor": factor("expert_weights_scale", keys)}


def groups(keys: ArchitectureKeys, found: Found) -> JsonObject:
    wanted = {
        "n_group": GgufKey("expert_group_count", int, 1),
        "topk_group": GgufKey("expert_group_used_count", int, 1),
    }
    # Files have 0 for one group.
    return {name: num or 1 for name, num in said(keys, found, wanted).items()}


# GLM 4.5, dots 1: experts like those of DeepSeek V3.
sigmoid_experts = experts(
    SIGMOID,
    {
        **CHOSEN,
        "n_routed_experts": GgufKey("expert_count", int),
        "moe_intermediate_size": SIZE,
        "n_shared_experts": GgufKey("expert_shared_count", int, 0),
        "first_k_dense_replace": GgufKey("leading_dense_block_count", int, 0),
        "norm_topk_prob": GgufKey(NORMED, bool, False),
    },
    scaled,
    groups,
)

"""Translates the metadata of a GGUF file into the keys of a `config.json`.

This module knows the keys and their usual values; `config/model.py` checks the values. A key that
weft would not compute as the file demands is refused by name.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from weft.config.families.family import FULL
from weft.config.families.gguf import MLP, StateLayers, expert_size
from weft.config.families.table import GGUF_FILES
from weft.config.metadata import metadata_value
from weft.config.model import BadCheckpoint, ModelConfig, UnsupportedModel
from weft.config.numbers import shown
from weft.json_types import JsonMapping, JsonObject

T = TypeVar("T")

# Keys of an architecture that change the computation → the values that change nothing.
CHANGES_NOTHING: dict[str, tuple[float, ...]] = {
    "expert_count": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "use_parallel_residual": (0,),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "router_logit_softcapping": (0,),
    "swin_norm": (0,),
}
# Keys of a `config.json` → the keys of files that most architectures read for them.
NAMES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "num_nextn_predict_layers": "nextn_predict_layers",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope_theta": "rope.freq_base",
    "factor": "rope.scaling.factor",
    "mscale": "rope.scaling.yarn_log_multiplier",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "llama_4_scaling_beta": "attention.temperature_scale",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
}
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# Bits per weight, with its scales, if codes are kept. Codes of 5 bits are kept in 6, ternary ones
# in 2; an index of a vector of weights is kept as the code of each weight.
KEPT_BITS = {
    "TQ1_0": 2.0625,
    "TQ2_0": 2.0625,
    "IQ1_S": 2.625,
    "Q2_K": 3.125,
    "IQ2_XXS": 3.3125,
    "IQ1_M": 3.5625,
    "IQ2_XS": 3.5625,
    "IQ2_S": 3.5625,
    "Q3_K": 3.5625,
    "IQ3_XXS": 4.3125,
    "IQ3_S": 4.3125,
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "Q4_K": 4.625,
    "IQ4_NL": 4.5,
    "IQ4_XS": 4.3125,
    "MXFP4": 5.0,
    "Q5_0": 6.5,
    "Q5_1": 7.0,
    "Q5_K": 6.625,
    "Q6_K": 6.5625,
    "Q8_0": 8.5,
}
WIDEST_OF_FOUR = 5.0  # of a weight whose code has four bits
PRECISE = ("token_embd.weight", "output.weight")  # at least eight bits, whatever is asked for
# Type of most weights → dtype of computation; bfloat16 for all others.
DTYPES = {"F32": "float32", "F16": "float16"}


class StoredTensor(Protocol):
    """The facts of a tensor of the file that this module uses."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def num_bytes(self) -> int: ...


class GgufModel(NamedTuple):
    """The content of one GGUF file, or of several that are one model."""

    name: str  # for errors
    metadata: JsonMapping
    tensors: Mapping[str, StoredTensor]  # by the names in the file
    rope_factors: Sequence[float] = ()  # values of `rope_freqs.weight`
    short_factors: Sequence[float] = ()  # values of `rope_factors_short.weight`
    long_factors: Sequence[float] = ()  # values of `rope_factors_long.weight`


def hf_config(model: GgufModel) -> JsonObject:
    """The model's `config.json`. Raises UnsupportedModel and BadCheckpoint."""
    keys = _Keys(model)
    keys.require_usual()
    num_heads = keys.number("attention.head_count", int)
    hidden_size = keys.number("embedding_length", int)
    # 0 or fewer heads are refused later, with the other sizes.
    head_dim = keys.number("attention.key_length", int, hidden_size // max(num_heads, 1))
    architecture = keys.architecture
    rotated = keys.number("rope.dimension_count", int, head_dim)
    sizes = () if architecture.is_latent else ("attention.value_length", "rope.dimension_count")
    for key in sizes:
        other = keys.number(key, int, head_dim)
        if other != head_dim and not (other == rotated and architecture.is_partial):
            raise UnsupportedModel(
                f"{model.name}: {keys.full(key)} is {other}, but heads have {head_dim} values; "
                "other values and partly rotated heads are not supported"
            )
    if head_dim < 1:
        raise UnsupportedModel(
            f"{model.name}: {keys.full('embedding_length')} is {hidden_size} and "
            f"{keys.full('attention.head_count')} {num_heads}: heads must have at least 1 value"
        )
    if architecture.is_partial and not 1 <= rotated <= head_dim:
        raise UnsupportedModel(
            f"{model.name}: {keys.full('rope.dimension_count')} is {rotated}; 1 to {head_dim}, the "
            "values of a head, are expected"
        )
    if model.rope_factors and 2 * len(model.rope_factors) != head_dim:
        raise BadCheckpoint(
            f"{model.name}: rope_freqs.weight has {len(model.rope_factors)} values; "
            f"heads of {head_dim} need {head_dim // 2}"
        )
    found: JsonObject = {
        "architectures": [keys.files.model],
        "hidden_size": hidden_size,
        "intermediate_size": keys.number("feed_forward_length", int, keys.expert_size),
        "num_hidden_layers": keys.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.number("attention.head_count_kv", int, num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.number("context_length", int),
        keys.files.family.norm_eps_key: keys.number(architecture.norm_eps, float),
        "rope_parameters": _rope(keys),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "attention_bias": _has_any(model, "blk.0.attn_q.bias", "blk.0.attn_qkv.bias"),
        "mlp_bias": "blk.0.ffn_up.bias" in model.tensors,
        "dtype": _dtype(model.tensors),
    }
    found["quantization_config"] = {
        "quant_method": "gguf",
        "types": ", ".join(_code_types(model.tensors)),
        **_coded(model.tensors),
    }
    if keys.num_ahead:
        found["num_nextn_predict_layers"] = keys.num_ahead
    if architecture.is_partial:
        found["partial_rotary_factor"] = rotated / head_dim
    if architecture.has_qk_norm:
        found["use_qk_norm"] = "blk.0.attn_q_norm.weight" in model.tensors
    if architecture.states is not None:
        found["layer_types"] = keys.layer_types(architecture.states)
    found |= architecture.more(keys, found)
    found["vocab_size"] = _vocab_size(model, found)
    _check_layers(keys, found)
    bos = _token_id(model, "bos_token_id")
    if bos is not None:
        found["bos_token_id"] = bos
    ends = [_token_id(model, key) for key in ENDS]
    found["eos_token_id"] = sorted({token for token in ends if token is not None})
    try:
        ModelConfig.from_hf(found, model.name)
    except UnsupportedModel as exc:
        raise type(exc)(f"{model.name}: {keys.in_words_of_file(str(exc), found)}") from exc
    return found


def hf_sampling(metadata: JsonMapping) -> JsonObject:
    """The model's sampling parameters, under the keys of a `generation_config.json`."""
    found = {}
    for key, name in SAMPLING.items():
        value = metadata.get(f"general.sampling.{key}")
        if value is not None:
            found[name] = value
    return found


class _Keys:
    """Reads the keys of the file's architecture."""

    def __init__(self, model: GgufModel) -> None:
        """Raises UnsupportedModel for an architecture that weft does not support."""
        self._model = model
        architecture = model.metadata.get("general.architecture")
        if architecture not in GGUF_FILES:
            raise UnsupportedModel(
                f"{model.name}: GGUF of architecture {str(architecture)[:64]!r} is not supported; "
                f"supported are {', '.join(GGUF_FILES)}"
            )
        self._prefix = str(architecture)
        self.files = GGUF_FILES[self._prefix]
        self.architecture = self.files.architecture
        self.names = {**NAMES, self.files.family.norm_eps_key: self.architecture.norm_eps}

    def full(self, key: str) -> str:
        return f"{self._prefix}.{key}"

    def number(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The number of a key. A list with one number per layer is accepted if all are equal."""
        full = self.full(key)
        value: Any = self._model.metadata.get(full)
        if hasattr(value, "tolist"):
            each = set(value.tolist())
            if key in self.architecture.by_layer:
                each = set(value.tolist()[:1])
            if self.architecture.states is not None:
                each.discard(0)  # layers that keep a state have no heads
            if len(each) != 1:
                raise UnsupportedModel(
                    f"{self._model.name}: {full} differs between layers, which is not supported"
                )
            value = each.pop()
        if kind is float and type(value) is int:
            value = float(value)
        return metadata_value(self._model.name, {full: value}, full, kind, default)

    def note_name(self, name: str, key: str) -> None:
        self.names[name] = key

    def in_words_of_file(self, message: str, config: JsonMapping) -> str:
        """A message about keys of a `config.json` that was made of the file, with the file's own
        keys for those that have the same value there, and beside those that were computed."""
        rope: JsonMapping = config.get("rope_parameters", {})
        values: dict[str, list[str]] = {}
        for part in (config, rope, *rope.values()):
            if isinstance(part, dict):  # rotations of the layers of one kind
                for name, value in part.items():
                    values.setdefault(name, []).append(str(value))

        def own(word: re.Match[str]) -> str:
            key = self.full(self.names.get(word[0], ""))
            in_file = self._model.metadata.get(key)
            if in_file is None or word[0] not in values:
                return word[0]
            if str(in_file) in values[word[0]]:
                return key
            return f"{word[0]} (from {key})"

        return re.sub(r"\w+", own, message)

    def text(self, key: str, default: str) -> str:
        value = self._model.metadata.get(self.full(key), default)
        return str(value)[:64]

    def require_usual(self) -> None:
        """Raise UnsupportedModel for a key whose value changes the computation."""
        for key, usual in CHANGES_NOTHING.items():
            if key in self.architecture.reads:
                continue
            value = self._model.metadata.get(self.full(key), usual[0])
            if hasattr(value, "tolist") or value not in usual:
                raise UnsupportedModel(
                    f"{self._model.name}: {self.full(key)} is {str(value)[:64]}, "
                    "which is not supported"
                )

    def flags(self, key: str) -> list[bool]:
        if self._model.metadata.get(self.full(key)) is None:
            return []
        return [bool(value) for value in self._each(key, bool, int)]

    def numbers(self, key: str) -> list[int]:
        if not hasattr(self._model.metadata.get(self.full(key)), "tolist"):
            return [self.number(key, int)] * self.num_layers
        return self._each(key, int)

    def _each(self, key: str, *kinds: type) -> list[Any]:
        """The value of each layer, from a list of values of these types. Raises BadCheckpoint."""
        values: Any = self._model.metadata[self.full(key)]
        each = values.tolist() if hasattr(values, "tolist") else []
        if not each or any(type(value) not in kinds for value in each):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise BadCheckpoint(
                f"{self._model.name}: {self.full(key)} is {shown(each or values)}; a list of "
                f"{names}, one for each layer, is expected"
            )
        if len(each) < self.num_layers:
            raise BadCheckpoint(
                f"{self._model.name}: {self.full(key)} has {len(each)} layers of {self.num_layers}"
            )
        return list(each[: self.num_layers])

    def layers_with(self, tensor: str) -> list[bool]:
        layers = range(self.num_layers)
        return [f"blk.{layer}.{tensor}" in self._model.tensors for layer in layers]

    def has(self, tensor: str) -> bool:
        return any(self.layers_with(tensor))

    def num_rows(self, tensor: str) -> int:
        return _shape(self._model, tensor)[0]

    def layer_types(self, states: StateLayers) -> list[str]:
        """The kind of each layer, by its tensors."""
        kinds = []
        for layer in range(self.num_layers):
            block = f"blk.{layer}"
            kind = FULL
            if f"{block}.{states.tensor}" in self._model.tensors:
                kind = states.kind
            elif states.one_part and not _has_any(self._model, f"{block}.attn_q.weight"):
                kind = MLP
            kinds.append(kind)
        return kinds

    @property
    def expert_size(self) -> int | None:
        """The inner size of an expert, if the file has it."""
        if self._model.metadata.get(self.full("expert_feed_forward_length")) is None:
            return None
        return self.number("expert_feed_forward_length", int)

    def short_and_long_factors(self) -> tuple[Sequence[float], Sequence[float]]:
        return self._model.short_factors, self._model.long_factors

    @property
    def num_layers(self) -> int:
        """Number of layers, without the last ones that predict tokens ahead. Raises BadCheckpoint
        if there is none, or if there are fewer tensors than layers."""
        num_layers = self.number("block_count", int) - self.num_ahead
        num_tensors = len(self._model.tensors)
        if not 1 <= num_layers <= num_tensors or self.num_ahead < 0:
            ahead = f", {self.num_ahead:,} of them to predict ahead" if self.num_ahead else ""
            raise BadCheckpoint(
                f"{self._model.name}: {self.full('block_count')} is "
                f"{num_layers + self.num_ahead:,}{ahead}, but it has {num_tensors:,} tensors"
            )
        return num_layers

    @property
    def num_ahead(self) -> int:
        """Number of layers after the model's last one (`nextn`)."""
        return self.number("nextn_predict_layers", int, 0)

    @property
    def rope_factors(self) -> Sequence[float]:
        return self._model.rope_factors

    @property
    def model(self) -> GgufModel:
        return self._model

    @property
    def label(self) -> str:
        return self._model.name


def _rope(keys: _Keys) -> JsonObject:
    found: JsonObject = {"rope_theta": keys.number("rope.freq_base", float, 10_000.0)}
    kind = keys.text("rope.scaling.type", "none")
    # Old files have only the factor.
    factor = keys.number("rope.scale_linear", float, 1.0)
    if factor != 1.0 and kind == "none":
        kind = "linear"
    factor = keys.number("rope.scaling.factor", float, factor)
    if keys.rope_factors and kind == "none":
        return found | {"rope_type": "factors", "factors": list(keys.rope_factors)}
    if kind == "none":
        return found | {"rope_type": "default"}
    if kind not in ("linear", "yarn") or keys.rope_factors:
        raise UnsupportedModel(
            f"{keys.label}: {keys.full('rope.scaling.type')} is {kind!r}, which is not supported; "
            "supported are none, linear and yarn"
        )
    found |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        found["beta_fast"] = keys.number("rope.scaling.yarn_beta_fast", float, 32.0)
        found["beta_slow"] = keys.number("rope.scaling.yarn_beta_slow", float, 1.0)
    original = keys.number("rope.scaling.original_context_length", int, 0)
    if original:
        found["original_max_position_embeddings"] = original
    return found


def _dtype(tensors: Mapping[str, StoredTensor]) -> str:
    """The dtype of computation, from the type of most of the file's bytes."""
    num_bytes: Counter[str] = Counter()
    for tensor in tensors.values():
        if len(tensor.shape) > 1:
            num_bytes[tensor.dtype] += tensor.num_bytes
    most = num_bytes.most_common(1)
    if most:
        return DTYPES.get(most[0][0], "bfloat16")
    return "bfloat16"


def _code_types(tensors: Mapping[str, StoredTensor]) -> list[str]:
    """The types of weights that are codes; the type with most bytes comes first."""
    num_bytes: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.dtype in KEPT_BITS:
            num_bytes[tensor.dtype] += tensor.num_bytes
    return [name for name, _ in num_bytes.most_common()]


def _coded(tensors: Mapping[str, StoredTensor]) -> dict[str, int]:
    """The number of weights that are codes, that of wide ones (`ModelConfig.num_wide`), and their
    bytes if they are kept."""
    num_coded = 0
    num_wide = 0
    num_bits = 0.0
    for name, tensor in tensors.items():
        if tensor.dtype in KEPT_BITS:
            num_weights = math.prod(tensor.shape)
            num_coded += num_weights
            num_bits += num_weights * KEPT_BITS[tensor.dtype]
            if KEPT_BITS[tensor.dtype] > WIDEST_OF_FOUR and name not in PRECISE:
                num_wide += num_weights
    return {"num_coded": num_coded, "num_wide": num_wide, "coded_bytes": int(num_bits / 8)}


def _vocab_size(model: GgufModel, config: JsonMapping) -> int:
    """The number of rows of the token embedding."""
    num_rows = _shape(model, "token_embd.weight")[0]
    _require_shape(model, "token_embd.weight", (num_rows, config["hidden_size"]))
    return num_rows


def _check_layers(keys: _Keys, config: JsonMapping) -> None:
    """Raise BadCheckpoint if the tensors of the first and the last layer do not have the sizes in
    the metadata: weft must not allocate memory by sizes that a file only claims."""
    model = keys.model
    last = config["num_hidden_layers"] - 1
    states = keys.architecture.states
    kinds = config.get("layer_types", [])
    _check_layer_inputs(model, config)
    # The first layer, the last one, and the first of each kind.
    firsts = {kinds.index(kind) for kind in set(kinds)}
    for layer in {0, last, *firsts}:
        block = f"blk.{layer}"
        kind = kinds[layer] if states is not None else FULL
        if states is not None and kind == states.kind:
            _check_state_layer(keys, config, block)
        if kind == FULL or (states is not None and states.with_attention):
            _check_attention(keys, config, layer)
        if states is not None and states.one_part and kind != MLP:
            continue
        is_last_of_many = layer == last and keys.number("expert_count", int, 0) > 0
        if is_last_of_many or _has_any(model, f"{block}.ffn_gate_inp.weight"):
            _check_experts(keys, config, block)
        else:
            _check_feed_forward(keys, config, block, _inner_size(config, layer))


def _check_attention(keys: _Keys, config: JsonMapping, layer: int) -> None:
    model = keys.model
    block = f"blk.{layer}"
    hidden_size = config["hidden_size"]
    q_size, kv_size = _attention_sizes(config, layer)
    states = keys.architecture.states
    if states is not None and states.attention_has_gate:
        q_size *= 2
    if keys.architecture.is_latent:
        _check_latents(model, config, block)
    elif f"{block}.attn_qkv.weight" in model.tensors:
        size = q_size + 2 * kv_size
        _require_shape(model, f"{block}.attn_qkv.weight", (size, hidden_size))
    else:
        _require_shape(model, f"{block}.attn_q.weight", (q_size, hidden_size))
        last = config["num_hidden_layers"] - 1
        if layer <= last - config.get("num_kv_shared_layers", 0):
            _require_shape(model, f"{block}.attn_k.weight", (kv_size, hidden_size))


def _check_latents(model: GgufModel, config: JsonMapping, block: str) -> None:
    hidden_size = config["hidden_size"]
    num_heads = config["num_attention_heads"]
    rank = config["kv_lora_rank"]
    size = rank + config["qk_rope_head_dim"]
    _require_shape(model, f"{block}.attn_kv_a_mqa.weight", (size, hidden_size))
    size = num_heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    if config["q_lora_rank"]:
        _require_shape(model, f"{block}.attn_q_b.weight", (size, config["q_lora_rank"]))
    else:
        _require_shape(model, f"{block}.attn_q.weight", (size, hidden_size))
    if config["head_matrices_are_apart"]:
        shape = (num_heads, config["v_head_dim"], rank)
        _require_shape(model, f"{block}.attn_v_b.weight", shape)
    else:
        size = num_heads * (config["qk_nope_head_dim"] + config["v_head_dim"])
        _require_shape(model, f"{block}.attn_kv_b.weight", (size, rank))


def _attention_sizes(config: JsonMapping, layer: int) -> tuple[int, int]:
    """The numbers of values of queries and of keys in a layer."""
    of_layer = config.get("per_layer_config", {}).get(str(layer), config)
    head_dim = of_layer["head_dim"]
    return config["num_attention_heads"] * head_dim, of_layer["num_key_value_heads"] * head_dim


def _check_layer_inputs(model: GgufModel, config: JsonMapping) -> None:
    size = config.get("hidden_size_per_layer_input", 0) * config["num_hidden_layers"]
    if size:
        num_rows = config.get("vocab_size_per_layer_input", config["vocab_size"])
        shape = (num_rows, size)
        _require_shape(model, "per_layer_token_embd.weight", shape)
        shape = (size, config["hidden_size"])
        _require_shape(model, "per_layer_model_proj.weight", shape)
    if "altup_num_inputs" in config:
        num_others = config["altup_num_inputs"] - 1
        of_streams = (num_others, config["hidden_size"], config["hidden_size"])
        for name in ("altup_proj", "altup_unembd_proj"):
            _require_shape(model, f"{name}.weight", of_streams)


def _check_state_layer(keys: _Keys, config: JsonMapping, block: str) -> None:
    model = keys.model
    hidden_size = config["hidden_size"]
    states = keys.architecture.states
    if states is not None and states.inputs is not None:
        name, num_rows = states.inputs
        _require_shape(model, f"{block}.{name}", (num_rows(config), hidden_size))
        return
    if "linear_num_key_heads" not in config:
        # Gates and values; of Mamba 2 also B and C of each group, and a step of each head.
        inner = keys.number("ssm.inner_size", int)
        size = 2 * inner
        if _has_any(model, f"{block}.ssm_x.weight"):
            steps = keys.number("ssm.time_step_rank", int)
            read = steps + 2 * keys.number("ssm.state_size", int)
            _require_shape(model, f"{block}.ssm_x.weight", (read, inner))
            _require_shape(model, f"{block}.ssm_dt.weight", (inner, steps))
        else:
            size += 2 * keys.number("ssm.group_count", int) * keys.number("ssm.state_size", int)
            size += keys.number("ssm.time_step_rank", int)
        _require_shape(model, f"{block}.ssm_in.weight", (size, hidden_size))
        return
    num_keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    num_values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    if _has_any(model, f"{block}.ssm_in.weight"):
        size = num_keys + 2 * num_values
        _require_shape(model, f"{block}.ssm_in.weight", (size, hidden_size))
    else:
        size = num_keys + num_values
        _require_shape(model, f"{block}.attn_qkv.weight", (size, hidden_size))


def _inner_size(config: JsonMapping, layer: int) -> int:
    """The inner size of the feed-forward part of a layer."""
    sizes = config.get("intermediate_sizes") or []
    if sizes:
        return int(sizes[layer])
    is_last = layer == config["num_hidden_layers"] - 1
    is_wide = is_last and config.get("use_double_wide_mlp", False)
    return int(config["intermediate_size"]) * (2 if is_wide else 1)


def _check_feed_forward(keys: _Keys, config: JsonMapping, block: str, inner: int) -> None:
    parts = ["ffn_gate", "ffn_up"]
    if keys.architecture.has_gate_in_up:
        inner *= 2
    if keys.architecture.has_gate_in_up or not keys.architecture.has_gate:
        parts = ["ffn_up"]
    for part in parts:
        shape = (inner, config["hidden_size"])
        _require_shape(keys.model, f"{block}.{part}.weight", shape)


def _check_experts(keys: _Keys, config: JsonMapping, block: str) -> None:
    num_experts = keys.number("expert_count", int)
    shape = (expert_size(keys, config), config["hidden_size"])
    _require_shape(keys.model, f"{block}.ffn_gate_inp.weight", (num_experts, shape[1]))
    # Old files have one tensor per expert.
    if _has_any(keys.model, f"{block}.ffn_up.0.weight"):
        _require_shape(keys.model, f"{block}.ffn_up.0.weight", shape)
    elif _has_any(keys.model, f"{block}.ffn_gate_up_exps.weight"):
        both = (num_experts, 2 * shape[0], shape[1])
        _require_shape(keys.model, f"{block}.ffn_gate_up_exps.weight", both)
    else:
        _require_shape(keys.model, f"{block}.ffn_up_exps.weight", (num_experts, *shape))


def _has_any(model: GgufModel, *names: str) -> bool:
    return any(name in model.tensors for name in names)


def _require_shape(model: GgufModel, name: str, expected: tuple[int, ...]) -> None:
    shape = _shape(model, name)
    if shape != expected:
        raise BadCheckpoint(
            f"{model.name}: {name} is {list(shape)}; its metadata says {list(expected)}"
        )


def _shape(model: GgufModel, name: str) -> tuple[int, ...]:
    if name not in model.tensors:
        raise BadCheckpoint(f"{model.name} has no tensor {name}, which its metadata implies")
    return model.tensors[name].shape


def _token_id(model: GgufModel, key: str) -> int | None:
    """The id of a special token; None if the file has none. Raises BadCheckpoint if it is not in
    the vocabulary."""
    value = model.metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    num_tokens = model.tensors["token_embd.weight"].shape[0]
    if type(value) is not int or not 0 <= value < num_tokens:
        raise BadCheckpoint(
            f"{model.name}: tokenizer.ggml.{key} is {str(value)[:64]}; "
            f"0 to {num_tokens - 1:,} are in the vocabulary"
        )
    return value

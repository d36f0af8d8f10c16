"""The architecture of a model, read from a Hugging Face
`config.json` once and said in our own names.

ModelError              the model that the user gave cannot be served; one sentence says why
├── UnsupportedModel    we know what it is, and do not have it
├── ModelNotFound       no such folder or hub id, or a file is missing or unreadable
└── BadCheckpoint       the weights do not fit the architecture
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from weft.config.pooling import BadPooling, PoolingConfig, classifier, sentence_layout
from weft.config.quantized import CODES, READ, UnreadFormat, stored_as
from weft.config.turn_end import turn_end_id

T = TypeVar("T")

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}  # name -> bytes
KV_DTYPES = {**DTYPES, "float8_e4m3fn": 1}
ROPE_SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn")


class ModelError(ValueError):
    """The model that the user gave cannot be served."""


class UnsupportedModel(ModelError):
    """The model is valid, but of a kind that is not implemented."""


class ModelNotFound(ModelError):
    """There is no such model, or a file of it is missing or unreadable."""


class BadCheckpoint(ModelError):
    """The weights do not fit the architecture."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base, and the scaling of its frequencies."""

    theta: float = 10_000.0
    scaling: str = "default"  # default, linear, llama3, yarn, factors
    factor: float = 1.0
    original_max_position: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float = 1.0  # yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    factors: tuple[float, ...] = ()  # factors: one for each pair of a head, as GGUF has them


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the model code, the memory sizing and the scheduler need to know of a model."""

    architecture: str  # "Qwen3ForCausalLM"
    name: str  # last part of the path or hub id
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    dtype: str  # of weights and KV: as stored, until another is chosen
    kv_dtype: str = ""  # of KV, where it is another: also int8, float8_e4m3fn
    quantize: str = ""  # bits that weights are kept in, where they are fewer: int8, int4, fp8
    # Bits that they are stored in, if these can be kept: int8, fp8; or codes, with scales of
    # groups.
    stored_as: str = ""
    stored_types: str = ""  # codes: the names of their types, for people,
    stored_bytes: int = 0  # and the bytes of all weights where codes are kept
    keeps_codes: bool = False  # whether they are
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int = 0  # tokens that a token sees, itself included; 0: all
    full_attention_layers: tuple[int, ...] = ()  # layers that see all tokens in spite of the window
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    # What it gives of a prompt, if that is not the tokens that follow.
    pooling: PoolingConfig | None = None
    is_encoder: bool = False  # every token sees all others; there is no KV
    activation: str = "silu"  # of the feed-forward part
    num_positions: int = 0  # encoder: rows of its table of positions,
    first_position: int = 0  # and which of them is that of the first token
    num_token_types: int = 0  # encoder: kinds of segments that tokens may belong to

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        if self.is_encoder:
            return 0
        head = (
            self.head_dim + 4
            if self.kv_dtype == "int8"
            else self.head_dim * KV_DTYPES[self.kv_dtype or self.dtype]
        )
        return 2 * self.num_layers * self.num_kv_heads * head  # int8: with a float32 scale

    @property
    def num_parameters(self) -> int:
        """Weights of the model, without biases and norms."""
        return self._num_layer_parameters + self._num_embedding_parameters

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights as they are kept, without biases, norms and scales."""
        if self.keeps_codes:
            return self.stored_bytes
        embeddings = self._num_embedding_parameters
        layers = self._num_layer_parameters
        if self.is_encoder and self.quantize:
            embeddings *= DTYPES["bfloat16"]  # as our CPU kernels keep them
        match self.quantize:
            case "int8" | "fp8":
                return embeddings + layers
            case "int4":
                return embeddings + layers // 2
        return self.num_parameters * DTYPES[self.dtype]

    @property
    def _num_layer_parameters(self) -> int:
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        num_mlp = 3
        if self.is_encoder:
            num_mlp = 2
        return self.num_layers * (attention + num_mlp * self.hidden_size * self.intermediate_size)

    @property
    def _num_embedding_parameters(self) -> int:
        if self.is_encoder:
            return (self.vocab_size + self.num_positions + self.num_token_types) * self.hidden_size
        has_head = self.pooling is None and not self.tie_embeddings
        return self.vocab_size * self.hidden_size * (2 if has_head else 1)

    def window(self, layer: int) -> int:
        """How many tokens a token sees in this layer, itself included; 0: all."""
        if layer in self.full_attention_layers:
            return 0
        return self.sliding_window

    @classmethod
    def from_folder(cls, folder: Path, name: str = "") -> ModelConfig:
        """Read `config.json`, what `generation_config.json` and the tokenizer add to the
        end-of-sequence tokens, and how it pools.
        """
        model = cls.from_hf(
            read_json(folder / "config.json"),
            name or folder.resolve().name,
            _read_json_if_there(folder / "generation_config.json"),
            _read_json_if_there(folder / "hf_quant_config.json"),
        )
        end = turn_end_id(folder)
        if end is not None and end < model.vocab_size:
            model = replace(model, eos_token_ids=tuple(dict.fromkeys((*model.eos_token_ids, end))))
        try:
            layout = sentence_layout(folder)
        except BadPooling as exc:
            raise UnsupportedModel(f"{model.name}: {exc}") from exc
        if layout is None or (model.pooling is not None and model.pooling.task == "classify"):
            return model
        if layout.pooling.kind == "cls" and not model.is_encoder:
            raise UnsupportedModel(
                f"{model.name} pools its first token, which in a decoder sees nothing but itself"
            )
        max_position = min(model.max_position, layout.max_len or model.max_position)
        return replace(model, pooling=layout.pooling, max_position=max_position)

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        name: str,
        generation: Mapping[str, Any] | None = None,
        quantized: Mapping[str, Any] | None = None,
    ) -> ModelConfig:
        """Translate a `config.json`. Raises `UnsupportedModel` for what is missing,
        or not implemented.
        """
        architecture = _architecture(config)
        family = FAMILIES[architecture]
        try:
            stored = stored_as(config, quantized)
        except UnreadFormat as exc:
            raise UnsupportedModel(
                f"{name} is quantised in a format that is not read: {exc}. Read are {READ}"
            ) from exc
        quantization = _get(config, "quantization_config", dict, {})
        activations = ENCODER_ACTIVATIONS if family.is_encoder else ("silu",)
        if (activation := _get(config, "hidden_act", str, activations[0])) not in activations:
            allowed = (
                f"{', '.join(map(repr, activations))} {'are' if len(activations) > 1 else 'is'}"
            )
            raise UnsupportedModel(f"hidden_act is {activation!r}; only {allowed} supported")
        num_heads = _size(config, "num_attention_heads")
        num_layers = _size(config, "num_hidden_layers")
        hidden_size = _size(config, "hidden_size")
        num_positions = max_position = _size(config, "max_position_embeddings")
        first_position = 0
        if family.positions_begin_after_padding:
            first_position = 1 + _get(config, "pad_token_id", int, 1)
        max_position -= first_position
        attention_bias = family.has_attention_bias and _get(config, "attention_bias", bool, False)
        window, full_attention_layers = _sliding_window(config, family, num_layers)
        rope = _rope(config, max_position)
        if rope.scaling == "yarn":  # some checkpoints state the length before scaling
            max_position = max(max_position, int(rope.original_max_position * rope.factor))
        model = cls(
            architecture=architecture,
            name=name,
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_size(config, "num_key_value_heads", num_heads),
            head_dim=_size(config, "head_dim", family.head_dim or hidden_size // num_heads),
            intermediate_size=_size(config, "intermediate_size"),
            max_position=max_position,
            norm_eps=_number(config, family.norm_eps_key, low=0.0),
            rope=rope,
            dtype=_dtype(config),
            stored_as=stored,
            stored_types=_get(quantization, "types", str, "") if stored == CODES else "",
            stored_bytes=_get(quantization, "kept_bytes", int, 0) if stored == CODES else 0,
            tie_embeddings=family.is_encoder or _get(config, "tie_word_embeddings", bool, False),
            qkv_bias=family.qkv_bias or attention_bias,
            o_bias=family.is_encoder or attention_bias,
            mlp_bias=family.is_encoder
            or (family.has_mlp_bias and _get(config, "mlp_bias", bool, False)),
            qk_norm=family.qk_norm,
            sliding_window=window,
            full_attention_layers=full_attention_layers,
            bos_token_id=next(iter(_token_ids(config, "bos_token_id")), None),
            eos_token_ids=tuple(
                dict.fromkeys(
                    _token_ids(config, "eos_token_id")
                    + _token_ids(generation or {}, "eos_token_id")
                )
            ),
            pooling=_pooling(config, family),
            is_encoder=family.is_encoder,
            activation=activation,
            num_positions=num_positions if family.is_encoder else 0,
            first_position=first_position,
            num_token_types=_size(config, "type_vocab_size") if family.is_encoder else 0,
        )
        for token in model.eos_token_ids:
            if not 0 <= token < model.vocab_size:
                raise UnsupportedModel(
                    f"eos_token_id is {token}; 0 to {model.vocab_size - 1:,} are in the vocabulary"
                )
        if model.num_heads % model.num_kv_heads or model.head_dim % 2:
            raise UnsupportedModel(
                f"{model.num_heads} heads of {model.head_dim} with {model.num_kv_heads} KV "
                "heads: the heads must be a multiple of the KV heads, and their size even"
            )
        return model


@dataclass(frozen=True, kw_only=True)
class Family:
    """What an architecture means beyond the keys of its `config.json`,
    and which optional keys it obeys.
    """

    qkv_bias: bool = False  # always there
    qk_norm: bool = False
    has_attention_bias: bool = False  # obeys "attention_bias"
    has_mlp_bias: bool = False  # obeys "mlp_bias"
    head_dim: int = 0  # when the key is missing; 0: hidden_size / heads
    has_window: bool = False  # obeys "sliding_window"
    # ... only with "use_sliding_window", and from layer "max_window_layers" on.
    window_switch: bool = False
    norm_eps_key: str = "rms_norm_eps"
    is_encoder: bool = False
    positions_begin_after_padding: bool = False  # the first token's is "pad_token_id" + 1
    task: str = "generate"  # what the architecture is for: its head, or that it has none


ENCODER_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")

_DECODERS = {
    "Llama": Family(has_attention_bias=True, has_mlp_bias=True),
    "Mistral": Family(has_window=True),
    "Qwen2": Family(qkv_bias=True, has_window=True, window_switch=True),
    "Qwen3": Family(
        qk_norm=True, has_attention_bias=True, head_dim=128, has_window=True, window_switch=True
    ),
}
_BERT = Family(is_encoder=True, qkv_bias=True, norm_eps_key="layer_norm_eps")
_ROBERTA = replace(_BERT, positions_begin_after_padding=True)
_ENCODERS = {"Bert": _BERT, "Roberta": _ROBERTA, "XLMRoberta": _ROBERTA}

FAMILIES = {
    **{f"{name}ForCausalLM": family for name, family in _DECODERS.items()},
    **{
        f"{name}Model": replace(family, task="embed")
        for name, family in (_DECODERS | _ENCODERS).items()
    },
    **{
        f"{name}ForSequenceClassification": replace(family, task="classify")
        for name, family in (_DECODERS | _ENCODERS).items()
    },
}


def _architecture(config: Mapping[str, Any]) -> str:
    architectures = _get(config, "architectures", list)
    for architecture in architectures:
        if architecture in FAMILIES:
            return str(architecture)
    code = ""
    if config.get("auto_map"):
        code = "; its own code (auto_map) is never run"
    raise UnsupportedModel(
        f"architecture {architectures} is not supported{code}; supported are {', '.join(FAMILIES)}"
    )


def own_code(folder: Path) -> str:
    """The code that a model of a known architecture brings with it, and that is never run;
    "" for none.
    """
    auto_map = read_json(folder / "config.json").get("auto_map")
    named = auto_map.values() if isinstance(auto_map, dict) else ()
    return ", ".join(sorted({str(one).partition(".")[0][:100] + ".py" for one in named}))


def _pooling(config: Mapping[str, Any], family: Family) -> PoolingConfig | None:
    """What the architecture gives of a prompt, as long as no other file says otherwise."""
    if family.is_encoder and (config.get("is_decoder") or config.get("add_cross_attention")):
        raise UnsupportedModel("is_decoder and add_cross_attention are supported in no encoder")
    if not family.is_encoder and (
        config.get("is_causal") is False or config.get("use_bidirectional_attention")
    ):
        raise UnsupportedModel("a decoder whose tokens see those behind them is not supported")
    if family.task == "generate":
        return None
    kind = "last"
    if family.is_encoder:
        kind = "cls"
    if family.task == "embed":
        return PoolingConfig(kind=kind)
    try:
        return classifier(config, kind)
    except BadPooling as exc:
        raise UnsupportedModel(str(exc)) from exc


def _sliding_window(
    config: Mapping[str, Any], family: Family, num_layers: int
) -> tuple[int, tuple[int, ...]]:
    """The window (0: none), and the layers that do without it."""
    window = 0
    if family.has_window:
        window = _get(config, "sliding_window", int, 0)
    if family.window_switch and not _get(config, "use_sliding_window", bool, False):
        window = 0
    if window <= 0:
        return 0, ()
    if not family.window_switch:
        return window, ()
    layer_types = _get(config, "layer_types", list, [])
    if layer_types:
        return window, tuple(i for i, kind in enumerate(layer_types) if kind == "full_attention")
    return window, tuple(range(min(_get(config, "max_window_layers", int, 28), num_layers)))


def _rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling`."""
    values = {**_get(config, "rope_scaling", dict, {}), **_get(config, "rope_parameters", dict, {})}
    theta = _number(
        values, "rope_theta", _number(config, "rope_theta", 10_000.0, above=0.0), above=0.0
    )
    scaling = _get(values, "rope_type", str, _get(values, "type", str, "default"))
    if scaling == "factors":  # in no config.json but ours (`config/gguf.py`)
        return RopeConfig(theta=theta, scaling=scaling, factors=tuple(values["factors"]))
    if scaling not in ROPE_SCALINGS:
        raise UnsupportedModel(
            f"rope type {scaling!r} is not supported; supported are {', '.join(ROPE_SCALINGS)}"
        )
    if (
        _get(
            values,
            "partial_rotary_factor",
            float,
            _get(config, "partial_rotary_factor", float, 1.0),
        )
        != 1.0
    ):
        raise UnsupportedModel(
            "partial_rotary_factor is not 1; partly rotated heads are not supported"
        )
    if scaling in (
        "default",
        "dynamic",
    ):  # dynamic changes nothing up to max_position, and beyond it nobody gets
        return RopeConfig(theta=theta)
    factor = _number(values, "factor", above=0.0)
    original = _size(values, "original_max_position_embeddings", max_position)
    original = _size(config, "original_max_position_embeddings", original)
    if scaling == "llama3":
        return RopeConfig(
            theta=theta,
            scaling=scaling,
            factor=factor,
            original_max_position=original,
            low_freq_factor=_get(values, "low_freq_factor", float),
            high_freq_factor=_get(values, "high_freq_factor", float),
        )
    if scaling == "yarn":
        if not _get(values, "truncate", bool, True):
            raise UnsupportedModel("rope type 'yarn' with truncate false is not supported")
        return RopeConfig(
            theta=theta,
            scaling=scaling,
            factor=factor,
            original_max_position=original,
            attention_factor=_yarn_attention_factor(values, factor),
            beta_fast=_get(values, "beta_fast", float, 32.0),
            beta_slow=_get(values, "beta_slow", float, 1.0),
        )
    return RopeConfig(theta=theta, scaling=scaling, factor=factor)


def _yarn_attention_factor(values: Mapping[str, Any], factor: float) -> float:
    """Source: YaRN, arXiv:2309.00071, section 3.4; `mscale` is DeepSeek's refinement of it."""

    def temperature(scale: float) -> float:
        if factor > 1:
            return 0.1 * scale * math.log(factor) + 1.0
        return 1.0

    mscale = _get(values, "mscale", float, 0.0)
    mscale_all = _get(values, "mscale_all_dim", float, 0.0)
    default = (
        temperature(mscale) / temperature(mscale_all) if mscale and mscale_all else temperature(1.0)
    )
    return _get(values, "attention_factor", float, default)


def _dtype(config: Mapping[str, Any]) -> str:
    dtype = _get(config, "dtype", str, _get(config, "torch_dtype", str, "float32"))
    if dtype not in DTYPES:
        raise UnsupportedModel(
            f"dtype {dtype!r} is not supported; supported are {', '.join(DTYPES)}"
        )
    return dtype


def _token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The ids of a key that holds none, one or several."""
    value = config.get(key)
    if value is None:
        ids = []
    elif isinstance(value, list):
        ids = value
    else:
        ids = [value]
    if not all(isinstance(token, int) for token in ids):
        raise UnsupportedModel(f"{key} is {value!r}; a token id or a list of them is expected")
    return tuple(ids)


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _get(config, key, int, default)
    if value < 1:
        raise UnsupportedModel(f"{key} is {value}; it must be at least 1")
    return value


def _number(
    config: Mapping[str, Any],
    key: str,
    default: float | None = None,
    *,
    low: float = -math.inf,
    above: float = -math.inf,
) -> float:
    """A finite number that is at least `low` and greater than `above`."""
    value = _get(config, key, float, default)
    if not (math.isfinite(value) and value >= low and value > above):
        allowed = f"greater than {above:g}" if math.isfinite(above) else f"at least {low:g}"
        raise UnsupportedModel(f"{key} is {value:g}; it must be a number {allowed}")
    return value


def _get(config: Mapping[str, Any], key: str, kind: type[T], default: T | None = None) -> T:
    """The value of a key, which null and absence leave to the default;
    without a default it must be there.
    """
    value = config.get(key)
    if value is None:
        if default is None:
            raise UnsupportedModel(f"config.json has no {key!r}")
        return default
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 2**1_000 else math.inf
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UnsupportedModel(f"{key} is {value!r}; config.json must give it as {kind.__name__}")
    return value


def _read_json_if_there(path: Path) -> dict[str, Any]:
    if path.exists():
        return read_json(path)
    return {}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of a model. Raises ModelNotFound."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFound(f"{path.parent} has no {path.name}: it is not a model folder") from None
    except (OSError, ValueError) as exc:
        raise ModelNotFound(f"{path} cannot be read: {exc}") from exc
    except RecursionError:
        raise ModelNotFound(f"{path} cannot be read: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ModelNotFound(f"{path} is not a JSON object")
    return value

"""The description of a family, and functions that the readers of several families share:
activations, biases, kinds of layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from weft.config.config_json import get, number, size
from weft.config.decoder import DecoderSpec, MlpSpec
from weft.config.encoder_spec import EncoderSpec
from weft.config.families.gguf import Architecture
from weft.config.model_errors import UnsupportedModel
from weft.config.vision.spec import TowerSpec
from weft.json_types import JsonMapping

FULL = "full_attention"
SLIDING = "sliding_attention"

Config = JsonMapping  # a `config.json`


@dataclass(frozen=True, kw_only=True)
class Family:
    """An architecture: its reader, and facts that its `config.json` does not contain."""

    read: Callable[[Config], DecoderSpec] | None = None  # None: no decoder
    encoder: Callable[[Config], EncoderSpec] | None = None  # of texts; None: a decoder
    defaults: JsonMapping = field(default_factory=dict)  # values of keys that a file may omit
    aliases: Mapping[str, str] = field(default_factory=dict)  # usual key → its key in this family
    implied: Callable[[Config], JsonMapping] | None = None  # values that follow from others
    norm_eps_key: str = "rms_norm_eps"
    # Whether a `text_config` with tied embeddings has priority over the whole config: older
    # releases wrote this key only there.
    ties_by_text: bool = False
    task: str = "generate"  # the task, by the head of the architecture, or by its absence
    # Reads the tower of pictures, videos or sounds, from a whole `config.json` and the decoder's
    # hidden size; None: weft computes none.
    tower: Callable[[Config, int], TowerSpec | None] | None = None
    # The architectures of GGUF files with models of this family, by their names in files.
    gguf: Mapping[str, Architecture] = field(default_factory=dict)

    @property
    def is_encoder(self) -> bool:
        return self.encoder is not None


def activation(config: Config, allowed: Sequence[str] = ("silu",), key: str = "hidden_act") -> str:
    """The activation of the feed-forward part; the first of `allowed` without the key. Raises
    UnsupportedModel if it is none of `allowed`."""
    name = get(config, key, str, allowed[0])
    if name not in allowed:
        verb = "are" if len(allowed) > 1 else "is"
        names = ", ".join(map(repr, allowed))
        raise UnsupportedModel(f"{key} is {name!r}; only {names} {verb} supported")
    return name


def flag(config: Config, key: str, default: bool = False) -> bool:
    return get(config, key, bool, default)


def mlp_of(config: Config) -> MlpSpec:
    """The gated feed-forward part of Llama."""
    return MlpSpec(activation=activation(config), bias=flag(config, "mlp_bias"))


def head_dim_of(config: Config) -> int:
    """The size of a head; if the file has none, all heads together have the hidden size."""
    heads = size(config, "num_attention_heads")
    return size(config, "head_dim", size(config, "hidden_size") // heads)


def scale(config: Config, key: str, default: float = 1.0) -> float:
    return number(config, key, default, above=0.0)


def layer_types(
    config: Config,
    default: Callable[[int], str],
    kinds: tuple[str, str] = (FULL, SLIDING),
) -> list[str]:
    """The kind of each layer, one of `kinds`; `default` gives it if the file does not."""
    num_layers = size(config, "num_hidden_layers")
    types: list[str] = get(config, "layer_types", list, [])
    if not types:
        return [default(layer) for layer in range(num_layers)]
    if len(types) < num_layers:
        raise UnsupportedModel(f"layer_types has {len(types)} layers of {num_layers}")
    for kind in types:
        if kind not in kinds:
            raise UnsupportedModel(
                f"layer_types has {str(kind)[:64]!r}; only {kinds[0]!r} and {kinds[1]!r} are "
                "supported"
            )
    return types[:num_layers]


def every(period: int) -> Callable[[int], str]:
    """The kind of each layer: the last of every `period` layers attends to all tokens, the others
    to a window."""

    def kind(layer: int) -> str:
        if (layer + 1) % period:
            return SLIDING
        return FULL

    return kind


def window(config: Config, kind: str = SLIDING) -> int:
    """The window of a layer of this kind; 0: the layer sees all tokens."""
    if kind == FULL:
        return 0
    return max(get(config, "sliding_window", int, 0), 0)

"""Heads: small models that guess the next tokens from the hidden states that a model's own steps
have computed. What a checkpoint says of one, as a `ModelConfig` with one layer.

    EAGLE-3   a layer of Llama over [embedding, state]; a state is made of three layers' outputs,
              and after the first guess it is the head's own output. arXiv:2503.01840
    MTP       a layer of the model's own kind after its last one, in the model's own checkpoint;
              of several, only the first is read. arXiv:2412.19437
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from weft.config.config_json import MAX_LAYERS, get, section, size
from weft.config.model_errors import UnsupportedModel
from weft.json_types import JsonMapping

MTP = "mtp"
EAGLE3 = "eagle3"
# Names of the architecture in checkpoints of SGLang and of vLLM, and of the package speculators.
EAGLE3_CLASSES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
SPECULATORS = "speculators_model_type"
KEPT_BYTES = 2  # of a value of a hidden state that is kept for a head: bfloat16


class TargetSizes(NamedTuple):
    """The sizes of the model that a head guesses for."""

    num_layers: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class MtpNames:
    """An MTP layer in a checkpoint. `{layer}` is the number of the model's layers."""

    mark: str  # the name of a tensor that only a checkpoint with such a layer has
    prefix: str
    layer: str  # the name of the decoder layer
    embedding_norm: str
    state_norm: str
    projection: str
    norm: str
    embedding_first: bool = True  # in the projection's input
    # Whether it reads the output of the model's final norm, not that of its last layer.
    reads_normed: bool = True

    @property
    def norms(self) -> list[str]:
        """The names of its tensors outside of the decoder layer, besides the projection."""
        parts = (self.embedding_norm, self.state_norm, self.norm)
        return [f"{self.prefix}.{part}.weight" for part in parts]

    def of(self, num_layers: int) -> MtpNames:
        """The names for a model with so many layers."""

        def named(text: str) -> str:
            return text.format(layer=num_layers)

        return replace(
            self, mark=named(self.mark), prefix=named(self.prefix), layer=named(self.layer)
        )


# By the names in checkpoints, within the base model where a name begins with "model.".
MTP_NAMES = (
    # DeepSeek V3, GLM 4.5 to 4.7
    MtpNames(
        mark="model.layers.{layer}.eh_proj.weight",
        prefix="model.layers.{layer}",
        layer="model.layers.{layer}",
        embedding_norm="enorm",
        state_norm="hnorm",
        projection="eh_proj",
        norm="shared_head.norm",
    ),
    # MiMo
    MtpNames(
        mark="model.mtp_layers.0.input_proj.weight",
        prefix="model.mtp_layers.0",
        layer="model.mtp_layers.0",
        embedding_norm="token_layernorm",
        state_norm="hidden_layernorm",
        projection="input_proj",
        norm="final_layernorm",
        embedding_first=False,
        reads_normed=False,
    ),
    # Qwen3-Next, Qwen3.5
    MtpNames(
        mark="mtp.fc.weight",
        prefix="mtp",
        layer="mtp.layers.0",
        embedding_norm="pre_fc_norm_embedding",
        state_norm="pre_fc_norm_hidden",
        projection="fc",
        norm="norm",
    ),
)


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """What a head reads, and how it differs from a decoder of one layer."""

    kind: str
    # It reads the inputs of these layers of the model; the number of layers: the output of the
    # last.
    reads: tuple[int, ...]
    read_size: int  # values of each
    num_logits: int  # tokens that it can guess; fewer than the vocabulary: it lists them
    layer: str = "midlayer"  # the name of its layer in checkpoints
    # Whether the layer adds its results to the state as it was normed, not as it came.
    adds_to_normed: bool = False
    mtp: MtpNames | None = None  # of an MTP layer

    @property
    def width(self) -> int:
        """Values that are kept of each token."""
        return len(self.reads) * self.read_size

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept of each token."""
        return self.width * KEPT_BYTES


def is_head(config: JsonMapping) -> bool:
    """Whether a `config.json` describes a head, and no model."""
    if SPECULATORS in config:
        return True
    names = config.get("architectures")
    return isinstance(names, list) and any(name in EAGLE3_CLASSES for name in names)


def mtp_spec(names: Collection[str], target: TargetSizes) -> HeadSpec | None:
    """The MTP layer of a checkpoint with tensors of these `names`; None: there is none that weft
    knows."""
    for each in MTP_NAMES:
        found = each.of(target.num_layers)
        if found.mark not in names or not all(norm in names for norm in found.norms):
            continue
        return HeadSpec(
            kind=MTP,
            reads=(target.num_layers,),
            read_size=target.hidden_size,
            num_logits=target.vocab_size,
            mtp=found,
        )
    return None


def eagle3_layer(config: JsonMapping) -> dict[str, Any]:
    """The `config.json` of a Llama of one layer with the sizes of the head. Raises
    `UnsupportedModel`."""
    own = dict(config)
    if SPECULATORS in config:
        kind = get(config, SPECULATORS, str)
        if kind != EAGLE3:
            raise UnsupportedModel(f"{SPECULATORS} is {kind!r}; only {EAGLE3!r} is supported")
        own = dict(get(config, "transformer_layer_config", dict))
        own.setdefault("torch_dtype", config.get("torch_dtype", config.get("dtype")))
    num_layers = size(own, "num_hidden_layers", 1, most=MAX_LAYERS)
    if num_layers != 1:
        raise UnsupportedModel(f"a head of {num_layers} layers; only one layer is supported")
    return {
        **own,
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }


def eagle3_spec(config: JsonMapping, target: TargetSizes) -> HeadSpec:
    """What the head of this `config.json` reads of its model. Raises `UnsupportedModel`."""
    is_speculators = SPECULATORS in config
    reads = _reads(config, target.num_layers)
    target_size = size(config, "target_hidden_size", target.hidden_size)
    if target_size != target.hidden_size:
        raise UnsupportedModel(
            f"it reads hidden states of {target_size}, and those of the model have "
            f"{target.hidden_size}"
        )
    norms_first = get(config, "norm_before_residual", bool, is_speculators)
    for name in ("norm_before_fc", "fc_norm"):
        if config.get(name):
            raise UnsupportedModel(f"{name} is {config[name]!r}; only heads without are supported")
    return HeadSpec(
        kind=EAGLE3,
        reads=reads,
        read_size=target.hidden_size,
        num_logits=size(config, "draft_vocab_size", target.vocab_size),
        layer="layers.0" if is_speculators else "midlayer",
        adds_to_normed=norms_first,
    )


def _reads(config: JsonMapping, num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs the head reads. Two engines count them in two ways: by the input of a
    layer, or, in a part of its own, by the output of the one before."""
    own = section(config, "eagle_config")
    key = "eagle_aux_hidden_state_layer_ids"
    ids: Sequence[Any] | None = config.get(key)
    if ids is None and own.get(key) is not None:
        ids = [one + 1 for one in own[key] if isinstance(one, int)]
    if own.get("use_aux_hidden_state") is False:
        raise UnsupportedModel("use_aux_hidden_state is false; only heads that read three layers")
    if not ids:
        ids = (2, num_layers // 2, num_layers - 3)
    reads = tuple(ids)
    if len(reads) != 3 or any(type(one) is not int for one in reads):
        raise UnsupportedModel(f"{key} is {list(reads)}; three layers are expected")
    for one in reads:
        if not 0 <= one <= num_layers:
            raise UnsupportedModel(f"{key} has {one}; the model has {num_layers} layers")
    return reads

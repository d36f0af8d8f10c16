"""The architecture of a model, read once from a Hugging Face `config.json` and written in weft's
own names.

`families/` has the keys of each family; this module has what all models share.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from weft.config.config_json import MAX_LAYERS, count, get, number, said, section, size, token_ids
from weft.config.decoder import DecoderSpec, LatentSpec, MlpSpec, MoeSpec, QkNorm, RopeConfig
from weft.config.encoder_spec import EncoderSpec
from weft.config.families.family import Family
from weft.config.families.table import FAMILIES
from weft.config.heads import HeadSpec, TargetSizes, eagle3_layer, eagle3_spec, is_head, mtp_spec
from weft.config.model_errors import (
    BadCheckpoint,
    BadConfig,
    ModelError,
    ModelNotFound,
    UnsupportedModel,
)
from weft.config.numbers import shown
from weft.config.pooling import (
    BadPooling,
    PoolingConfig,
    classifier,
    colbert_layout,
    sentence_layout,
)
from weft.config.quantized import READ, Quantization, UnreadFormat, quantization
from weft.config.sight import Sight
from weft.config.turn_end import implied_end_ids, turn_end_id
from weft.config.vision.spec import TowerSpec
from weft.json_types import JsonMapping, JsonObject

__all__ = [
    "DTYPES",
    "FAMILIES",
    "KV_DTYPES",
    "BadCheckpoint",
    "ModelConfig",
    "ModelError",
    "ModelNotFound",
    "RopeConfig",
    "UnsupportedModel",
    "own_code",
    "read_json",
]

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}  # name -> bytes
KV_DTYPES = {**DTYPES, "float8_e4m3fn": 1}
TOKEN_KEYS = ("bos_token_id", "eos_token_id")


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Numbers of weights of a model, if its sizes do not imply them."""

    embeddings: int  # embeddings and heads, which keep at least eight bits
    matrices: int  # matrices of all other products
    others: int  # weights that are never quantised


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The facts of a model that the model code, the memory sizing and the scheduler need."""

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
    dtype: str  # dtype of weights and KV: as stored, until another is chosen
    kv_dtype: str = ""  # dtype of KV if it differs; also int8, float8_e4m3fn
    quantize: str = ""  # format of the kept weights if it has fewer bits: int8, int4, fp8
    quantize_encoder: str = ""  # the same for the encoder beside the decoder: int12
    stored: Quantization = field(default_factory=Quantization)  # format of the stored weights
    num_coded: int = 0  # number of weights that are stored as codes
    num_wide: int = 0  # of these, codes of more than four bits, but of embedding and head
    coded_bytes: int = 0  # bytes of these codes with their scales
    keeps_codes: bool = False  # whether these codes are kept as they are stored
    tie_embeddings: bool = False
    decoder: DecoderSpec = field(default_factory=DecoderSpec)  # not used for encoders
    context_length: int = 0  # longest served context, if known; 0: max_position
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    # How the model makes a vector or scores of a prompt; None: it generates tokens.
    pooling: PoolingConfig | None = None
    # An encoder of texts: tokens see those after them, and there is no KV. None: a decoder.
    encoder: EncoderSpec | None = None
    # The `config.json` of a model that the code of transformers computes, as that code reads it.
    library_config: str = ""
    counted: ParameterCount | None = None  # the weights of such a model
    # The encoder of pictures, videos or sounds beside the decoder; None: none, or left out.
    vision: TowerSpec | None = None
    num_ahead: int = 0  # layers for speculation after the last one, in the same checkpoint
    # What a head that guesses for another model reads; None: this is a model of its own.
    head: HeadSpec | None = None

    @property
    def is_encoder(self) -> bool:
        return self.encoder is not None

    @property
    def num_token_types(self) -> int:
        """Number of segment types of tokens."""
        return 0 if self.encoder is None else self.encoder.num_token_types

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        if self.is_encoder:
            return 0
        return sum(self.kv_bytes(layer) for layer in range(self.num_layers))

    def kv_bytes(self, layer: int) -> int:
        """Bytes of K and V of one token in this layer; 0: the layer keeps no K and V of its own."""
        spec = self.decoder.layer(layer)
        if not spec.attends or spec.attention.kv_of is not None:
            return 0
        num_heads, head_dim = self.kv_shape(layer)
        if self.kv_dtype == "int8":
            head = head_dim + 4  # a float32 scale
        else:
            head = head_dim * KV_DTYPES[self.kv_dtype or self.dtype]
        latent = spec.attention.latent
        if latent is None:
            return 2 * num_heads * head
        if latent.indexer is not None:
            head += latent.indexer.head_dim * KV_DTYPES[self.kv_dtype or self.dtype]
        return num_heads * head  # a latent is both key and value

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """Number of KV heads in this layer, and the size of a head."""
        attention = self.decoder.layer(layer).attention
        return attention.kv_heads or self.num_kv_heads, attention.head_dim or self.head_dim

    def kv_owner(self, layer: int) -> int:
        """The layer whose K and V this layer reads: an earlier layer, or itself."""
        earlier = self.decoder.layer(layer).attention.kv_of
        return layer if earlier is None else earlier

    @property
    def last_storing_layer(self) -> int:
        """The last layer that stores K, V or a state."""
        found = 0
        for layer in range(self.num_layers):
            spec = self.decoder.layer(layer)
            stores_kv = spec.attends and spec.attention.kv_of is None
            if stores_kv or spec.state is not None:
                found = layer
        return found

    @property
    def has_one_kv_shape(self) -> bool:
        """Whether K and V have the same sizes in all layers."""
        shapes = {self.kv_shape(layer) for layer in range(self.num_layers)}
        return len(shapes) == 1

    @property
    def latent(self) -> LatentSpec | None:
        """The latent that the cache keeps in place of K and V; None: it keeps K and V. All layers
        have the same."""
        return self.decoder.layer(0).attention.latent

    @property
    def norms_rotated(self) -> bool:
        """Whether queries and keys are normed after their rotation."""
        return any(layer.attention.qk_norm is QkNorm.ROTATED_HEAD for layer in self.decoder.layers)

    @property
    def num_kv_layers(self) -> int:
        """Number of layers with attention."""
        return sum(1 for layer in range(self.num_layers) if self.decoder.layer(layer).attends)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's states (float32), which some layers keep, over all layers; 0: no
        layer keeps a state."""
        num_floats = 0
        for layer in range(self.num_layers):
            state = self.decoder.layer(layer).state
            if state is not None:
                num_floats += state.state_floats
        return 4 * num_floats

    @property
    def heard_bytes(self) -> int:
        """Bytes of keys and values that a request keeps of an encoder's vectors, in float32; 0: its
        layers attend to none."""
        cross = self.decoder.cross
        if cross is None:
            return 0
        return 4 * self.num_layers * 2 * cross.num_positions * self.num_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Number of weights of the model, without biases and norms."""
        if self.counted is not None:
            return self.counted.embeddings + self.counted.matrices + self.counted.others
        return self._num_layer_parameters + self._num_embedding_parameters

    @property
    def num_active_parameters(self) -> int:
        """Number of weights that one token is multiplied with: only the chosen experts count."""
        return self._num_active_layer_parameters + self._num_embedding_parameters

    @property
    def has_experts(self) -> bool:
        return any(isinstance(layer.mlp, MoeSpec) for layer in self.decoder.layers)

    @property
    def mixer_size(self) -> int:
        """The largest number of values that attention, or the mixer in its place, makes of one
        token."""
        most = 0
        for index, layer in enumerate(self.decoder.layers):
            kv_heads, head_dim = self.kv_shape(index)
            num_heads = 2 * self.num_heads + 2 * kv_heads
            if layer.attention.gate:
                num_heads += self.num_heads
            size = num_heads * head_dim
            latent = layer.attention.latent
            if latent is not None:
                size += latent.query_rank
                if latent.indexer is not None:
                    # Also its key before the norm, and which keys are chosen.
                    size += latent.indexer.size + 2 * latent.indexer.head_dim
                    size += latent.indexer.num_chosen
                size += self.num_heads * (latent.query_dim + latent.value_dim)
            if not layer.attends:
                size = 0
            if layer.state is not None:
                size += layer.state.in_size + layer.state.out_size
            most = max(most, size)
        return most

    @property
    def inner_size(self) -> int:
        """The largest number of values that the feed-forward part of a layer makes of one token."""
        most = 0
        for layer in self.decoder.layers:
            if layer.mlp is None:
                continue
            if isinstance(layer.mlp, MlpSpec):
                size = 3 * (layer.mlp.size or self.intermediate_size)
            else:
                # Inputs and outputs of the chosen experts, each in its own row.
                wide = max(self.hidden_size, layer.mlp.size)
                size = layer.mlp.router.num_chosen * (2 * layer.mlp.size + 2 * wide)
                size += 3 * layer.mlp.shared_size + 3 * layer.mlp.dense_size
            most = max(most, size)
        return most

    @property
    def layer_inputs_size(self) -> int:
        """Number of values of a token that the inputs for each layer, and streams, need in a
        step."""
        num = 0
        if self.decoder.layer_inputs is not None:
            num += 2 * self.num_layers * self.decoder.layer_inputs.size
        if self.decoder.altup is not None:
            num += 4 * self.decoder.altup.num * self.hidden_size
        return num

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights as they are kept, without biases, norms and scales."""
        return self._decoder_bytes + self.vision_bytes

    @property
    def num_not_coded(self) -> int:
        """Number of weights that are stored as floats."""
        return max(self.num_parameters - self.num_coded, 0)

    @property
    def head_copy_bytes(self) -> int:
        """Bytes of the copy of the head in 8 bits that weft's CPU kernels keep beside one of
        floats."""
        if self.pooling is not None or self.quantize or self.keeps_codes:
            return 0
        return self.vocab_size * (self.hidden_size + 8)

    @property
    def vision_bytes(self) -> int:
        """Bytes of the weights of the encoder beside the decoder."""
        if self.vision is None:
            return 0
        each = 2 if self.quantize_encoder else DTYPES[self.dtype]
        return self.vision.num_parameters * each

    @property
    def _decoder_bytes(self) -> int:
        if self.keeps_codes:
            each = 1 if self.quantize else DTYPES[self.dtype]
            return self.coded_bytes + self.num_not_coded * each
        if self.counted is not None:
            return self._counted_bytes(self.counted)
        embeddings = self._num_embedding_parameters
        layers = self._num_layer_parameters
        if self.is_encoder and self.quantize:
            embeddings *= DTYPES["bfloat16"]  # the type in weft's CPU kernels
        match self.quantize:
            case "int8" | "fp8":
                return embeddings + layers
            case "int4":
                return embeddings + layers // 2
        return self.num_parameters * DTYPES[self.dtype]

    def _counted_bytes(self, counted: ParameterCount) -> int:
        in_dtype = DTYPES[self.dtype]
        others = counted.others * in_dtype
        match self.quantize:
            case "int8" | "fp8":
                return counted.embeddings + counted.matrices + others
            case "int4":
                return counted.embeddings + counted.matrices // 2 + others
        return (counted.embeddings + counted.matrices) * in_dtype + others

    @property
    def _num_layer_parameters(self) -> int:
        num = 0
        for layer in range(self.num_layers):
            num += self._num_mixer_parameters(layer) + self._num_mlp_parameters(layer)
        inputs = self.decoder.layer_inputs
        if inputs is not None:
            # The projection of embeddings, and in each layer the gate and the output.
            num += 3 * self.num_layers * inputs.size * self.hidden_size
        return num + self._num_altup_parameters

    @property
    def _num_altup_parameters(self) -> int:
        """Number of weights that make streams, correct them, and stand beside attention."""
        spec = self.decoder.altup
        if spec is None:
            return 0
        of_layer = self.hidden_size * (2 * spec.rank + spec.num)
        outer = 2 * (spec.num - 1) * self.hidden_size**2
        return self.num_layers * of_layer + outer

    @property
    def _num_active_layer_parameters(self) -> int:
        num = self._num_layer_parameters
        for layer in range(self.num_layers):
            mlp = self.decoder.layer(layer).mlp
            if isinstance(mlp, MoeSpec):
                num_idle = mlp.router.num_experts - mlp.router.num_chosen
                num -= num_idle * mlp.num_matrices * self.hidden_size * mlp.size
        return num

    def _num_mixer_parameters(self, layer: int) -> int:
        """Number of weights of attention, and of the mixer with a state."""
        spec = self.decoder.layer(layer)
        num = 0
        if spec.state is not None:
            num += spec.state.num_weights(self.hidden_size)
        if not spec.attends:
            return num
        latent = spec.attention.latent
        if latent is not None:
            return num + self._num_latent_parameters(latent)
        kv_heads, head_dim = self.kv_shape(layer)
        num_heads = 2 * self.num_heads
        if spec.attention.kv_of is None:
            num_heads += kv_heads if spec.attention.values_are_keys else 2 * kv_heads
        if spec.attention.gate:
            num_heads += self.num_heads
        num += self.hidden_size * head_dim * num_heads
        if self.decoder.cross is not None:
            # Queries and results; the encoder has the matrices of keys and values.
            num += 2 * self.hidden_size * head_dim * self.num_heads
        return num

    def _num_latent_parameters(self, latent: LatentSpec) -> int:
        queries = self.num_heads * latent.query_dim
        num = self.hidden_size * (latent.key_dim + self.num_heads * latent.value_dim)
        num += self.num_heads * latent.rank * (latent.plain_dim + latent.value_dim)
        if latent.indexer is not None:
            index = latent.indexer
            num += latent.query_rank * index.heads * index.head_dim
            num += self.hidden_size * (index.head_dim + index.heads)
        if not latent.query_rank:
            return num + self.hidden_size * queries
        return num + latent.query_rank * (self.hidden_size + queries)

    def _num_mlp_parameters(self, layer: int) -> int:
        """Number of weights of the feed-forward part of a layer, with all of its experts."""
        mlp = self.decoder.layer(layer).mlp
        if mlp is None:
            return 0
        if isinstance(mlp, MoeSpec):
            inner = mlp.router.num_experts * mlp.size + mlp.shared_size + mlp.dense_size
            return (
                mlp.num_matrices * self.hidden_size * inner
                + mlp.router.num_experts * self.hidden_size
            )
        is_gated = mlp.is_gated if self.encoder is None else self.encoder.is_gated
        num_matrices = 3 if is_gated else 2
        inner = mlp.size or self.intermediate_size
        return num_matrices * self.hidden_size * inner

    @property
    def _num_embedding_parameters(self) -> int:
        if self.encoder is not None:
            return self._num_encoder_embeddings(self.encoder)
        has_head = self.pooling is None and not self.tie_embeddings
        row = self.hidden_size * (2 if has_head else 1)
        inputs = self.decoder.layer_inputs
        if inputs is not None:
            row += self.num_layers * inputs.size
        return self.vocab_size * row + self.decoder.num_positions * self.hidden_size

    def _num_encoder_embeddings(self, spec: EncoderSpec) -> int:
        """Number of weights of embeddings, and of a head with the size of the vocabulary."""
        num_rows = self.vocab_size + spec.num_positions + spec.num_token_types
        if spec.disentangled is not None:
            num_rows += 2 * spec.disentangled.span
        num = num_rows * (spec.embedding_size or self.hidden_size)
        if self.pooling is not None and self.pooling.kind == "sparse":
            num += self.vocab_size * self.hidden_size
        return num

    def window(self, layer: int) -> int:
        """Number of tokens that a token sees in this layer, including itself; 0: all, or the layer
        has no attention."""
        spec = self.decoder.layer(layer)
        return spec.attention.window if spec.attends else 0

    def sight(self, layer: int) -> Sight:
        """Which tokens a token sees in this layer."""
        return Sight(self.window(layer), self.decoder.layer(layer).attention.chunked)

    @classmethod
    def from_folder(cls, folder: Path, name: str = "") -> ModelConfig:
        """Read `config.json`, further end-of-sequence tokens from `generation_config.json` and the
        tokenizer, and the pooling.
        """
        model = cls.from_hf(
            read_json(folder / "config.json"),
            name or folder.resolve().name,
            read_json_if_there(folder / "generation_config.json"),
            read_json_if_there(folder / "hf_quant_config.json"),
        )
        return model.completed(folder)

    @classmethod
    def of_head(cls, folder: Path, target: ModelConfig) -> ModelConfig | None:
        """The head for the model `target` in a folder; None if it has no `config.json` of a head.
        Raises ModelError."""
        content = read_json_if_there(folder / "config.json") or {}
        if not is_head(content):
            return None
        model = cls.from_hf(eagle3_layer(content), folder.resolve().name)
        spec = eagle3_spec(content, target.as_target)
        hidden = model.hidden_size
        if hidden != target.hidden_size or model.vocab_size < target.vocab_size:
            raise UnsupportedModel(
                f"it was made for a model with hidden states of {hidden} and {model.vocab_size:,} "
                f"tokens; {target.name} has {target.hidden_size} and {target.vocab_size:,}"
            )
        if spec.num_logits > target.vocab_size:
            raise UnsupportedModel(
                f"draft_vocab_size is {spec.num_logits:,}; the model has {target.vocab_size:,}"
            )
        kv_heads, head_dim = model.kv_shape(0)
        matrices = hidden * (spec.width + 3 * model.intermediate_size)
        matrices += hidden * head_dim * (3 * model.num_heads + 4 * kv_heads)
        return replace(
            model,
            vocab_size=target.vocab_size,
            max_position=target.max_position,
            eos_token_ids=(),
            counted=ParameterCount(
                embeddings=hidden * spec.num_logits, matrices=matrices, others=5 * hidden
            ),
            head=spec,
        )

    @property
    def as_target(self) -> TargetSizes:
        """What a head that guesses for the model needs to know of it."""
        return TargetSizes(self.num_layers, self.hidden_size, self.vocab_size)

    def mtp(self, names: Collection[str]) -> ModelConfig | None:
        """The MTP layer after this model in a checkpoint with tensors of these `names`, which has
        the mechanisms of the last layer with attention; None without one."""
        spec = mtp_spec(names, self.as_target)
        if spec is None or self.decoder.norm.has_mean:
            return None
        layers = [self.decoder.layer(index) for index in range(self.num_layers)]
        with_both = [layer for layer in layers if layer.attends and layer.mlp is not None]
        if not with_both:
            return None
        layer = replace(with_both[-1], state=None)
        attention = replace(layer.attention, kv_of=None)
        own = replace(
            self,
            num_layers=1,
            decoder=replace(self.decoder, layers=(replace(layer, attention=attention),)),
            eos_token_ids=(),
            num_coded=0,
            num_wide=0,
            coded_bytes=0,
            counted=None,
            vision=None,
            head=spec,
        )
        matrices = own._num_layer_parameters + 2 * self.hidden_size**2
        counted = ParameterCount(embeddings=0, matrices=matrices, others=5 * self.hidden_size)
        return replace(own, counted=counted)

    def completed(self, folder: Path) -> ModelConfig:
        """The model with the facts from other files than `config.json`. Raises
        `UnsupportedModel`."""
        model = replace(self, eos_token_ids=self._all_ends(folder))
        try:
            layout = sentence_layout(folder)
            if model.pooling is not None and model.pooling.kind == "tokens":
                return replace(model, pooling=colbert_layout(folder))
        except BadPooling as exc:
            raise UnsupportedModel(f"{model.name}: {exc}") from exc
        pooling = model.pooling
        if pooling is not None and pooling.kind == "sparse" and layout is None:
            raise UnsupportedModel(
                f"{model.name} is a masked language model, which makes vectors if modules.json "
                "names its pooling (SpladePooling, or Pooling)"
            )
        if layout is None or (pooling is not None and pooling.task == "classify"):
            return model
        if layout.pooling.kind == "cls" and not model.is_encoder:
            raise UnsupportedModel(
                f"{model.name} pools its first token, which in a decoder sees nothing but itself"
            )
        model.require_layout(layout.pooling)
        max_position = min(model.max_position, layout.max_len or model.max_position)
        return replace(model, pooling=layout.pooling, max_position=max_position)

    def require_layout(self, pooling: PoolingConfig) -> None:
        """Raise `UnsupportedModel` if this model cannot be pooled like that."""
        if pooling.kind == "tokens" and not self.is_encoder:
            raise UnsupportedModel(
                f"{self.name} is a decoder, which makes no vector for each token"
            )
        is_filling = self.pooling is not None and self.pooling.kind == "sparse"
        if pooling.kind == "sparse" and not is_filling:
            raise UnsupportedModel(
                f"{self.name} has SpladePooling, which needs a masked language model "
                f"(...ForMaskedLM); it is {self.architecture}"
            )

    def _all_ends(self, folder: Path) -> tuple[int, ...]:
        """The tokens that end a generation: those of the settings, that of the tokenizer, and if
        the publisher gave no list for generation, those that the tokenizer's files imply."""
        found = list(self.eos_token_ids)
        end = turn_end_id(folder)
        if end is not None:
            found.append(end)
        generation = read_json_if_there(folder / "generation_config.json") or {}
        if not token_ids(generation, "eos_token_id"):
            found += implied_end_ids(folder, found)
        known = [token for token in found if 0 <= token < self.vocab_size]
        return tuple(dict.fromkeys(known))

    @classmethod
    def from_hf(
        cls,
        config: JsonMapping,
        name: str,
        generation: JsonMapping | None = None,
        quantized: JsonMapping | None = None,
    ) -> ModelConfig:
        """Translate a `config.json`. Raises `UnsupportedModel` for a missing key or a mechanism
        that is not implemented."""
        architecture = _architecture(config)
        family = FAMILIES[architecture]
        whole = config
        config = _of_the_text(config, family)
        stored = _quantization(config, name, quantized)
        described = section(config, "quantization_config")
        num_heads = size(config, "num_attention_heads")
        hidden_size = size(config, "hidden_size")
        model = cls(
            architecture=architecture,
            name=name,
            vocab_size=size(config, "vocab_size"),
            hidden_size=hidden_size,
            num_layers=size(config, "num_hidden_layers", most=MAX_LAYERS),
            num_ahead=count(config, "num_nextn_predict_layers"),
            num_heads=num_heads,
            num_kv_heads=size(config, "num_key_value_heads", num_heads),
            head_dim=size(config, "head_dim", hidden_size // num_heads),
            intermediate_size=size(config, "intermediate_size"),
            max_position=size(config, "max_position_embeddings"),
            norm_eps=number(config, family.norm_eps_key, low=0.0, most=1.0),
            dtype=stored_dtype(config),
            stored=stored,
            num_coded=get(described, "num_coded", int, 0),
            num_wide=get(described, "num_wide", int, 0),
            coded_bytes=get(described, "coded_bytes", int, 0),
            tie_embeddings=get(config, "tie_word_embeddings", bool, family.is_encoder),
            bos_token_id=next(iter(token_ids(config, "bos_token_id")), None),
            eos_token_ids=tuple(
                dict.fromkeys(
                    token_ids(config, "eos_token_id") + token_ids(generation or {}, "eos_token_id")
                )
            ),
            pooling=_pooling(config, family),
        )
        if family.encoder is not None:
            model = _as_encoder(model, family.encoder(config))
        elif family.read is not None:
            model = _as_decoder(model, family.read(config))
        if family.tower is not None:
            model = replace(model, vision=family.tower(whole, hidden_size))
        for token in model.eos_token_ids:
            if not 0 <= token < model.vocab_size:
                raise BadConfig(
                    f"eos_token_id is {token}; 0 to {model.vocab_size - 1:,} are in the vocabulary"
                )
        if model.num_heads % model.num_kv_heads or model.head_dim % 2:
            raise UnsupportedModel(
                f"num_attention_heads is {model.num_heads}, num_key_value_heads "
                f"{model.num_kv_heads} and head_dim {model.head_dim}: the heads must be a multiple "
                "of the KV heads, and their size even"
            )
        return model


def quantization_of(folder: Path) -> Quantization:
    """The storage format of the weights in a folder; `Quantization()` without a `config.json`.

    Raises ModelError.
    """
    return _quantization(
        read_json_if_there(folder / "config.json"),
        folder.name,
        read_json_if_there(folder / "hf_quant_config.json"),
    )


def _quantization(config: JsonMapping, name: str, other: JsonMapping | None) -> Quantization:
    try:
        return quantization(config, other)
    except UnreadFormat as exc:
        raise UnsupportedModel(
            f"{name} is quantised in a format that is not supported: {exc}. Supported are {READ}"
        ) from exc


def _of_the_text(config: JsonMapping, family: Family) -> JsonObject:
    """The values for the text model. In a model that also takes pictures or sounds, the keys of
    `text_config` have priority, except those that the whole model decides. The family has the
    defaults of missing keys."""
    text = section(config, "text_config")
    outer = said(config)
    whole = {key: outer[key] for key in ("tie_word_embeddings", *TOKEN_KEYS) if key in outer}
    found = {**family.defaults, **outer, **text, **whole}
    if family.ties_by_text and text.get("tie_word_embeddings") is True:
        found["tie_word_embeddings"] = True
    for ours, theirs in family.aliases.items():
        if found.get(theirs) is not None:
            found[ours] = found[theirs]
    if family.implied is not None:
        found |= family.implied(found)
    return found


def _as_encoder(model: ModelConfig, spec: EncoderSpec) -> ModelConfig:
    return replace(
        model,
        encoder=spec,
        max_position=model.max_position - spec.first_position,
        pooling=_pooled_as(model.pooling, spec),
    )


def _pooled_as(pooling: PoolingConfig | None, spec: EncoderSpec) -> PoolingConfig | None:
    """The pooling of a model, with what its family decides of it."""
    if pooling is None:
        return None
    if pooling.kind == "sparse" and spec.vocabulary is None:
        raise UnsupportedModel("the head of this family for its vocabulary is not supported")
    if pooling.task != "classify":
        return pooling
    if spec.classifier is None:
        raise UnsupportedModel("classifiers of this family are not supported in this form")
    return replace(pooling, kind=spec.classifier.kind)


def _as_decoder(model: ModelConfig, decoder: DecoderSpec) -> ModelConfig:
    max_position = model.max_position
    for layer in decoder.layers:
        rope = layer.attention.rope
        # Some checkpoints have the length before scaling here.
        if rope is not None and rope.scaling == "yarn":
            max_position = max(max_position, int(rope.original_max_position * rope.factor))
    model = replace(model, decoder=decoder, max_position=max_position)
    if model.latent is None:
        return model
    # The cache keeps one key for all heads, and queries have the same length as that key.
    return replace(model, num_kv_heads=1, head_dim=model.latent.key_dim)


def _architecture(config: JsonMapping) -> str:
    architectures = get(config, "architectures", list)
    for architecture in architectures:
        if isinstance(architecture, str) and architecture in FAMILIES:
            return architecture
    code = ""
    if config.get("auto_map"):
        code = "; its own code (auto_map) is never run"
    raise UnsupportedModel(
        f"architecture {shown(architectures)} is not supported{code}; supported are "
        f"{', '.join(FAMILIES)}"
    )


def own_code(folder: Path) -> str:
    """The code in the folder of a model of a known architecture, which weft never runs; "" for
    none."""
    auto_map = read_json(folder / "config.json").get("auto_map")
    named = auto_map.values() if isinstance(auto_map, dict) else ()
    modules = {str(one).partition(".")[0] for one in named}
    files = [f"{module[:100]}.py" for module in modules]
    return ", ".join(sorted(files))


def _pooling(config: JsonMapping, family: Family) -> PoolingConfig | None:
    """The pooling that the architecture implies; another file may change it."""
    if family.is_encoder and (config.get("is_decoder") or config.get("add_cross_attention")):
        raise UnsupportedModel("is_decoder and add_cross_attention are supported in no encoder")
    # "vision": tokens of pictures, which see each other; tokens of text do not.
    both_ways = config.get("use_bidirectional_attention") not in (None, False, "vision")
    if not family.is_encoder and (config.get("is_causal") is False or both_ways):
        raise UnsupportedModel("a decoder whose tokens see those after them is not supported")
    if family.task == "generate":
        return None
    kind = "last"
    if family.is_encoder:
        kind = "cls"
    if family.task == "tokens":
        return PoolingConfig(kind="tokens")
    if family.task == "fill":
        return PoolingConfig(kind="sparse", normalize=False)
    if family.task == "embed":
        return PoolingConfig(kind=kind)
    try:
        return classifier(config, kind)
    except BadPooling as exc:
        raise UnsupportedModel(str(exc)) from exc


def stored_dtype(config: JsonMapping) -> str:
    """The dtype of the weights. Raises `UnsupportedModel`."""
    dtype = get(config, "dtype", str, get(config, "torch_dtype", str, "float32"))
    if dtype not in DTYPES:
        raise UnsupportedModel(
            f"dtype {dtype!r} is not supported; supported are {', '.join(DTYPES)}"
        )
    return dtype


def read_json_if_there(path: Path) -> JsonObject:
    """Like `read_json`; {} if there is no such file."""
    if path.exists():
        return read_json(path)
    return {}


def read_json(path: Path) -> JsonObject:
    """The JSON object in a file of a model. Raises ModelNotFound."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ModelNotFound(f"{path.parent} has no {path.name}: it is not a model folder") from None
    except (OSError, ValueError) as exc:
        raise ModelNotFound(f"{path} cannot be read: {exc}") from exc
    except RecursionError:
        raise ModelNotFound(f"{path} cannot be read: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ModelNotFound(f"{path} is not a JSON object")
    return value

"""Describes an encoder of texts by its mechanisms, not by names of families.

    EncoderSpec ─┬─ EncoderLayerSpec ─ RopeConfig
                 ├─ DistanceBuckets, or DisentangledSpec
                 └─ ClassifierSpec, VocabularySpec

`config/families/` reads these from a `config.json`; `models/encoder.py` computes them. Sizes that
decoders have, too, are in `ModelConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.decoder import RopeConfig


@dataclass(frozen=True, kw_only=True)
class EncoderNames:
    """Names of modules in checkpoints, within the base model; "" for one that there is not."""

    words: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    types: str = "embeddings.token_type_embeddings"
    embedded_norm: str = "embeddings.LayerNorm"
    projected: str = ""  # from the size of embeddings to the hidden size
    layers: str = "encoder.layer"
    # One name: queries, keys and values are one tensor.
    qkv: tuple[str, ...] = (
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
    )
    out: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    # With a gate: the names of gate and up, or of one tensor with both.
    up: tuple[str, ...] = ("intermediate.dense",)
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"
    final_norm: str = ""


@dataclass(frozen=True, kw_only=True)
class EncoderLayerSpec:
    # A token sees the window - 1 tokens on either side of it; 0: all of its prompt.
    window: int = 0
    rope: RopeConfig | None = None


@dataclass(frozen=True, kw_only=True)
class DistanceBuckets:
    """A score of each head by the distance of key and query, which all layers share. Half of the
    buckets are for keys after the query, and half of these for one distance each; the others are
    wider by logarithms, up to `max_distance`. Source: arXiv:1910.10683, 2.1."""

    name: str  # of the table [num_buckets, heads], within the base model
    num_buckets: int
    max_distance: int


@dataclass(frozen=True, kw_only=True)
class DisentangledSpec:
    """Scores that also have the product of a query with the key of a distance, and of a key with
    the query of a distance. Vectors of distances are embeddings that all layers share, projected in
    each. Source: arXiv:2006.03654, 3.1; buckets: arXiv:2111.09543."""

    name: str  # of the embeddings of distances, within the base model
    norm: str  # of their norm; "": there is none
    by_key: bool  # queries meet keys of distances (c2p)
    by_query: bool  # keys meet queries of distances (p2c)
    # Names of the projections to keys and to queries of distances; ("", ""): those of tokens.
    projections: tuple[str, str]
    max_distance: int
    num_buckets: int  # of either sign; 0: each distance has a vector

    @property
    def span(self) -> int:
        """Vectors of either sign."""
        return self.num_buckets or self.max_distance

    @property
    def num_terms(self) -> int:
        return 1 + int(self.by_key) + int(self.by_query)


@dataclass(frozen=True, kw_only=True)
class ClassifierSpec:
    """out(norm(activation(dense(x)))), of the first token or of the mean of all."""

    dense: str  # full names of modules in checkpoints
    out: str
    activation: str = "tanh"
    dense_bias: bool = True
    norm: str = ""
    kind: str = "cls"  # or mean


@dataclass(frozen=True, kw_only=True)
class VocabularySpec:
    """The head of masked language models: out(norm(activation(dense(x)))), a number for each token
    of the vocabulary."""

    dense: str  # full names in checkpoints
    norm: str
    out: str  # of the matrix, if it is not that of the embedding
    bias: str  # of the tensor with a number for each token; "": there is none
    activation: str = "gelu"
    dense_bias: bool = True


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    names: EncoderNames = EncoderNames()
    base: str = "bert"  # prefix of the base model in checkpoints of full models
    layers: tuple[EncoderLayerSpec, ...] = (EncoderLayerSpec(),)  # repeated, as in a decoder
    activation: str = "gelu"
    is_gated: bool = False
    norms_first: bool = False  # x + f(norm(x)), and a norm in the end; else norm(x + f(x))
    skips_first_norm: bool = False  # the first layer's attention has no norm
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    embedding_size: int = 0  # 0: the hidden size
    projection_bias: bool = True
    projection_norms: bool = False  # the norm of embeddings stands after their projection
    num_positions: int = 0  # rows of the table of positions; 0: there is none
    first_position: int = 0  # row of the first token in that table
    num_token_types: int = 0  # number of segment types of tokens
    buckets: DistanceBuckets | None = None
    disentangled: DisentangledSpec | None = None
    classifier: ClassifierSpec | None = None
    vocabulary: VocabularySpec | None = None  # None: weft does not read it

    def layer(self, index: int) -> EncoderLayerSpec:
        return self.layers[index % len(self.layers)]

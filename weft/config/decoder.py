"""Describes a decoder by its mechanisms, not by names of families.

    DecoderSpec ─ LayerSpec ─┬─ AttentionSpec ─ RopeConfig
                             ├─ ShortConvSpec, GatedDeltaSpec, MambaSpec, Mamba1Spec,
                             │  or LightningSpec
                             └─ MlpSpec, or MoeSpec ─ RouterSpec

A layer has one of the first two parts, or both, or none.

`config/families/` reads these from a `config.json`; `models/decoder.py` computes them. Sizes that
all layers share are in `ModelConfig`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, NamedTuple, TypeAlias


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base, the rotated part of a head, and the scaling of
    frequencies."""

    theta: float = 10_000.0
    # default, linear, llama3, yarn, longrope, factors, proportional; none: nothing is rotated, so
    # positions change only how queries grow.
    scaling: str = "default"
    factor: float = 1.0
    original_max_position: int = 0  # llama3, yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float = 1.0  # yarn, longrope
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the range of mixed pairs is rounded to whole pairs
    factors: tuple[float, ...] = ()  # scaling "factors": one for each pair of a head, as in GGUF;
    # longrope: factors for contexts longer than the original
    short_factors: tuple[float, ...] = ()  # longrope: factors for all other contexts
    # The rotated part of a head's values, from the first value on; scaling "proportional": the
    # rotated part of its pairs, whose frequencies are those of a head that is rotated as a whole.
    share: float = 1.0
    dims: int = 0  # number of rotated values, if `share` does not give it; 0: `share` does
    side_by_side: bool = False  # pairs are (2 i, 2 i + 1), not (i, i + half)
    # Queries grow by 1 + query_growth ln(1 + (position + growth_offset) // original_max_position).
    query_growth: float = 0.0
    growth_offset: int = 0
    # The position that rotates each pair (M-RoPE): 0 time, 1 height, 2 width. (): tokens have one
    # position.
    axes: tuple[int, ...] = ()


class NormKind(Enum):
    RMS = "x / rms(x) * weight"
    RMS_PLUS_ONE = "x / rms(x) * (1 + weight)"
    RMS_EXACT = "x / rms(x) * weight, with the bits of float32"  # form of RMS_PLUS_ONE in GGUF
    LAYER = "(x - mean) / deviation * weight"
    LAYER_BIAS = "(x - mean) / deviation * weight + bias"
    LAYER_PLUS_ONE_BIAS = "(x - mean) / deviation * (1 + weight) + bias"
    LAYER_PLAIN = "(x - mean) / deviation"

    @property
    def has_mean(self) -> bool:
        return self not in (NormKind.RMS, NormKind.RMS_PLUS_ONE, NormKind.RMS_EXACT)

    @property
    def has_bias(self) -> bool:
        return self in (NormKind.LAYER_BIAS, NormKind.LAYER_PLUS_ONE_BIAS)


class NormPosition(Enum):
    """The position of a layer's norms; f is attention or the feed-forward part."""

    PRE = "x + f(norm(x))"
    POST = "x + norm(f(x))"
    BOTH = "x + norm(f(norm(x)))"
    STREAM = "norm(x) + f(norm(x)), one norm for both"
    PARALLEL = "x + attention(norm(x)) + mlp(norm(x)), one norm for both"
    PARALLEL_TWO = "x + attention(norm(x)) + mlp(norm(x)), a norm for each"

    @property
    def is_parallel(self) -> bool:
        return self in (NormPosition.PARALLEL, NormPosition.PARALLEL_TWO)


class QkNorm(Enum):
    NONE = "none"
    HEAD = "each head by itself"
    ROTATED_HEAD = "each head by itself, after its rotation"
    ALL_HEADS = "all heads of the queries, and all of the keys, as one vector"


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """Chooses the keys that a token attends to: those with the largest sums, over the indexer's
    heads, of weight * relu(query key). Its queries are products of the vector that those of
    attention are products of, too; it keeps one key for each token. Source: arXiv:2512.02556, 2.1.
    """

    heads: int
    head_dim: int  # of which the first values rotate, as many as in a head of attention
    num_chosen: int  # a token that sees no more keys attends to all of them
    side_by_side: bool = False  # as of `RopeConfig`
    norm_eps: float = 1e-6  # eps of the norm of keys

    @property
    def size(self) -> int:
        """Values of a token: queries, the key, and a weight for each head."""
        return (self.heads + 1) * self.head_dim + self.heads


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention: keys and values of all heads are products of one vector per
    token, the latent; keys also have one rotated part that all heads share. The cache keeps only
    these two, as one key [rotated | latent], whose latent part is also the value. The matrix that
    makes keys of latents is applied to the queries instead, and the matrix that makes values to the
    results. Source: arXiv:2405.04434, 2.1."""

    rank: int  # values of the latent
    query_rank: int  # values of the vector that the queries are products of; 0: there is none
    plain_dim: int  # values without a position in a head's queries and keys
    rotated_dim: int  # values with a position in a head's queries and keys
    value_dim: int  # values of a head's value
    norm_eps: float = 1e-6  # eps of the norms of the latent and of the queries' vector
    indexer: IndexerSpec | None = None  # None: a token attends to all that it sees

    @property
    def key_dim(self) -> int:
        """Values of a token in the cache; a head of the queries gets the same length."""
        return self.rotated_dim + self.rank

    @property
    def query_dim(self) -> int:
        """Values of a head of the queries, before that."""
        return self.plain_dim + self.rotated_dim


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    window: int = 0  # tokens that a token sees, including itself; 0: all
    chunked: bool = False  # it sees those of its chunk of `window` tokens (`config/sight.py`)
    rope: RopeConfig | None = RopeConfig()  # None: queries and keys have no positions
    scale: float = 0.0  # factor of scores; 0: 1 / sqrt(head_dim)
    score_cap: float = 0.0  # scores become cap * tanh(scores / cap); 0: no cap
    # Scores fall with distance by the slope of each head (ALiBi), which are 2^-x for x up to this
    # number. 0: they do not. Source: arXiv:2108.12409.
    alibi: float = 0.0
    # In the projection, a gate follows each head of the queries: the head's result is multiplied by
    # sigmoid(gate).
    gate: bool = False
    sinks: bool = False  # the softmax of each head has one more score, learnt, without a value
    qk_norm: QkNorm = QkNorm.NONE
    qk_norm_weight: bool = True  # whether that norm of each head has a weight
    qkv_bias: bool = False
    key_bias: bool = True  # whether the bias, if there is one, includes the keys
    out_bias: bool = False
    latent: LatentSpec | None = None  # None: each head has its own keys and values
    # KV heads, and the size of a head; 0: those of `ModelConfig`.
    kv_heads: int = 0
    head_dim: int = 0
    # The earlier layer whose K and V this layer reads, so that they are kept once; None: its own.
    kv_of: int | None = None
    values_are_keys: bool = False  # a value is the key, before the key's norm and rotation
    norms_values: bool = False  # each head of the values is normed, without a weight
    # Whether tokens see later ones in a step where some do (`MediaRules.sees_both_ways`).
    sees_later: bool = True


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec:
    """out(c · conv(b · x)): b, c and x are projections of the input, and conv sees the last `taps`
    tokens of each channel. The state is the last `taps` - 1 inputs of conv."""

    channels: int
    taps: int
    bias: bool = False  # whether the projections and the convolution have biases

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the float32 tensors that a request keeps."""
        return (conv_state_shape(self.channels, self.taps),)

    @property
    def state_floats(self) -> int:
        return num_floats(self.state_shapes)

    @property
    def in_size(self) -> int:
        """Values that its projections make of a token."""
        return 3 * self.channels

    @property
    def out_size(self) -> int:
        """Values that its output projection reads."""
        return self.channels

    def num_weights(self, hidden_size: int) -> int:
        """Of its projections."""
        return hidden_size * (self.in_size + self.out_size)


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec:
    """Linear attention by the gated delta rule: a convolution over the last `taps` tokens of
    queries, keys and values; a matrix per value head in place of a cache; a gated norm of each
    head's output. Source: arXiv:2412.06464."""

    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int
    value_dim: int
    taps: int
    # Value head h has key head h % key_heads; else the value heads of a key head are consecutive.
    is_tiled: bool = False

    @property
    def channels(self) -> int:
        """Channels of the convolution: all queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.out_size

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the float32 tensors: of the convolution, and of the matrices."""
        matrices = (
            self.value_heads,
            self.value_dim // STATE_LANES,
            self.key_dim,
            STATE_LANES,
        )
        return (conv_state_shape(self.channels, self.taps), matrices)

    @property
    def state_floats(self) -> int:
        return num_floats(self.state_shapes)

    @property
    def in_size(self) -> int:
        """Values that its projections make of a token, including gates and two rates per head."""
        return self.channels + self.out_size + 2 * self.value_heads

    @property
    def out_size(self) -> int:
        return self.value_heads * self.value_dim

    def num_weights(self, hidden_size: int) -> int:
        """Of its projections."""
        return hidden_size * (self.in_size + self.out_size)


class ScanNorm(Enum):
    """The norm of the output y of Mamba 2, over the heads of a group."""

    NONE = "y * silu(gate)"
    GATE_FIRST = "norm(y * silu(gate))"
    NORM_FIRST = "norm(y) * silu(gate)"


@dataclass(frozen=True, kw_only=True)
class MambaSpec:
    """Mamba 2: a convolution over the last `taps` tokens of the values x and of the vectors B and C
    that write and read each head's matrix; a gate and a norm. Source: arXiv:2405.21060."""

    heads: int  # a multiple of groups
    groups: int  # groups of consecutive heads; a group shares B and C
    head_dim: int
    state_dim: int
    taps: int
    conv_bias: bool = True
    bias: bool = False  # whether the projections have biases
    norm: ScanNorm = ScanNorm.GATE_FIRST

    @property
    def channels(self) -> int:
        """Channels of the convolution: all values x, and B and C of each group."""
        return self.out_size + 2 * self.groups * self.state_dim

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the float32 tensors: of the convolution, and of the matrices."""
        matrices = (
            self.heads,
            self.head_dim // STATE_LANES,
            self.state_dim,
            STATE_LANES,
        )
        return (conv_state_shape(self.channels, self.taps), matrices)

    @property
    def state_floats(self) -> int:
        return num_floats(self.state_shapes)

    @property
    def in_size(self) -> int:
        """Values that its projection makes of a token, including gates and a step per head."""
        return self.out_size + self.channels + self.heads

    @property
    def out_size(self) -> int:
        return self.heads * self.head_dim

    def num_weights(self, hidden_size: int) -> int:
        """Of its projections."""
        return hidden_size * (self.in_size + self.out_size)


@dataclass(frozen=True, kw_only=True)
class Mamba1Spec:
    """Mamba 1: each channel of the convolution has a vector in place of a cache, which decays at
    rates of its own; the step of a channel, and the vectors B and C that all share, are projections
    of the convolved channels. A gate, no norm. Source: arXiv:2312.00752."""

    channels: int
    state_dim: int
    step_rank: int  # values that the steps are projections of
    taps: int
    conv_bias: bool = True
    bias: bool = False  # whether the first and the last projection have biases
    norm_eps: float = 0.0  # of norms of B, C and of what makes steps; 0: there are none

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the float32 tensors: of the convolution, and of the vectors."""
        vectors = (self.channels // STATE_LANES, self.state_dim, STATE_LANES)
        return (conv_state_shape(self.channels, self.taps), vectors)

    @property
    def state_floats(self) -> int:
        return num_floats(self.state_shapes)

    @property
    def inner_sizes(self) -> tuple[int, int, int]:
        """Values that are projections of the convolved channels: what makes steps, B, and C."""
        return self.step_rank, self.state_dim, self.state_dim

    @property
    def in_size(self) -> int:
        """Values that its projections make of a token: channels, gates, steps and the rest."""
        return 3 * self.channels + sum(self.inner_sizes)

    @property
    def out_size(self) -> int:
        return self.channels

    def num_weights(self, hidden_size: int) -> int:
        """Of its projections."""
        inner = sum(self.inner_sizes) + self.step_rank
        return self.channels * (3 * hidden_size + inner)


@dataclass(frozen=True, kw_only=True)
class LightningSpec:
    """Lightning attention: a matrix per head in place of a cache, to which the product of a key and
    a value is added after it has decayed at a fixed rate. Queries, keys and values have an
    activation (silu); a norm over all heads and a gate follow. Source: arXiv:2501.08313, 2.2."""

    heads: int
    head_dim: int
    slope: float  # a matrix of head h, from 1 on, decays by exp(-slope 2^(-8 h / heads)) per token
    norm_eps: float = 1e-6

    @property
    def decays(self) -> list[float]:
        """The factor of each head."""
        exponents = (8 * head / self.heads for head in range(1, self.heads + 1))
        return [math.exp(-self.slope * 2**-exponent) for exponent in exponents]

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the float32 tensors that a request keeps."""
        return ((self.heads, self.head_dim // STATE_LANES, self.head_dim, STATE_LANES),)

    @property
    def state_floats(self) -> int:
        return num_floats(self.state_shapes)

    @property
    def in_size(self) -> int:
        """Values that its projections make of a token, including gates."""
        return 4 * self.out_size

    @property
    def out_size(self) -> int:
        return self.heads * self.head_dim

    def num_weights(self, hidden_size: int) -> int:
        """Of its projections."""
        return hidden_size * (self.in_size + self.out_size)


# Channels (or values) of a state that are consecutive in memory, as kernels read them.
STATE_LANES = 16


def conv_state_shape(channels: int, taps: int) -> tuple[int, ...]:
    return channels // STATE_LANES, taps - 1, STATE_LANES


def num_floats(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(math.prod(shape) for shape in shapes)


StateSpec: TypeAlias = ShortConvSpec | GatedDeltaSpec | MambaSpec | Mamba1Spec | LightningSpec


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    size: int = 0  # inner size; 0: `ModelConfig.intermediate_size`
    activation: str = "silu"  # one of ops.elementwise.ACTIVATIONS
    is_gated: bool = True  # down(activation(gate) * up); else down(activation(up))
    bias: bool = False
    # A gate is lowered by its row's mean plus so many standard deviations, and at least 0; None: it
    # stays as it is. Source: Gemma 3n.
    cut: float | None = None


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """The router: chooses the experts of each token, and their weights."""

    num_experts: int
    num_chosen: int  # experts per token
    # How logits become scores: softmax of all, softmax of the chosen ones, or sigmoid of each
    # (`ops.routing.Scores`).
    scores: str = "softmax"
    is_normed: bool = False  # weights are divided by their sum
    scale: float = 1.0  # factor of the weights
    bias: bool = False  # whether the logits have a bias
    choice_bias: bool = False  # a bias is added to scores to choose experts, but not to weights
    num_groups: int = 1  # groups of consecutive experts
    num_groups_chosen: int = 1  # groups that are chosen first, by the sum of their best two experts
    counts_one: bool = False  # groups are chosen by their best expert instead
    expert_scale: bool = False  # each expert has a learnt factor of its weights


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """A feed-forward part of many small ones, the experts; each token gets a few of them."""

    router: RouterSpec
    size: int  # inner size of an expert
    activation: str = "silu"  # one of ops.elementwise.GATES; without gates, of ACTIVATIONS
    is_gated: bool = True  # as of `MlpSpec`
    bias: bool = False
    shared_size: int = 0  # inner size of the shared part, which every token gets; 0: none
    # The input of an expert is multiplied by its weight, not its output; a token has one expert.
    weights_inputs: bool = False
    shared_gate: bool = False  # the shared part is multiplied by sigmoid(gate x)
    # A part of this size for every token, beside the experts: both have norms of their own before
    # and after them, and the router has its own norm, too. 0: none.
    dense_size: int = 0

    @property
    def num_matrices(self) -> int:
        """Of one expert."""
        return 3 if self.is_gated else 2


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    attention: AttentionSpec = AttentionSpec()
    attends: bool = True  # False: the layer has no attention, and keeps no K and V
    # The mixer in place of attention, or beside it: keeps a state of fixed size per request.
    state: StateSpec | None = None
    mlp: MlpSpec | MoeSpec | None = MlpSpec()  # None: the layer has no feed-forward part
    norms: NormPosition = NormPosition.PRE
    residual_scale: float = 1.0  # factor of the outputs of attention and the feed-forward part
    feed_scale: float = 0.0  # of the feed-forward part alone; 0: the same
    # Eps of the norms before the two parts; 0: that of `ModelConfig`.
    mix_eps: float = 0.0
    feed_eps: float = 0.0
    has_factor: bool = False  # the output of the whole layer is multiplied by a learnt number


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """The names of the tensors of experts in checkpoints, below the name of the feed-forward part.
    Tensors of expert N are below `experts.N.`; or all experts share one tensor below `experts.`,
    with one more dimension."""

    router: str = "gate"
    choice_bias: str = "gate.e_score_correction_bias"
    experts: str = "experts"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")  # without gates: the name of ups
    down: str = "down_proj"
    all_gate_up: str = "experts.gate_up_proj"  # all experts: gates, then ups of each; or ups
    all_down: str = "experts.down_proj"
    is_transposed: bool = False  # tensors of all experts have inputs before outputs
    alternate: bool = False  # gates and ups alternate in the tensor of all experts
    choice_bias_has_row: bool = False  # its shape is [1, experts]
    shared: str = "shared_experts"
    shared_is_beside: bool = False  # that name is beside the feed-forward part's, not below it
    shared_gate: str = "shared_expert_gate"
    router_norm: str = "router.scale"  # the norm of the router's input; this and the rest: Gemma 4
    expert_scale: str = "router.per_expert_scale"
    dense_post_norm: str = "post_feedforward_layernorm_1"
    pre_norm: str = "pre_feedforward_layernorm_2"
    post_norm: str = "post_feedforward_layernorm_2"


@dataclass(frozen=True, kw_only=True)
class StateNames:
    """The names of the tensors of a mixer with a state in checkpoints, below its own name."""

    mixer: str = "linear_attn"
    # Tensors of queries, keys and values, and of gates; or one name: its rows are grouped by key
    # head. In lightning attention, rows of the first tensor are grouped by head.
    inputs: tuple[str, ...] = ("in_proj_qkv", "in_proj_z")
    rates: tuple[str, ...] = ("in_proj_b", "in_proj_a")  # or one name, grouped in the same way
    conv: str = "conv1d"
    out: str = "out_proj"
    norm: str = "norm"
    decay_log: str = "A_log"
    decay_is_final: bool = False  # the tensor is -exp(decay_log)
    decay_bias: str = "dt_bias"
    skip: str = "D"
    inner: str = "x_proj"  # this and the next: Mamba 1
    steps: str = "dt_proj"


@dataclass(frozen=True, kw_only=True)
class LatentNames:
    """The names of the tensors of attention by latents in checkpoints, below its own name."""

    queries: str = "q_proj"  # if `LatentSpec.query_rank` is 0
    query_in: str = "q_a_proj"
    query_norm: str = "q_a_layernorm"
    query_out: str = "q_b_proj"
    latent_in: str = "kv_a_proj_with_mqa"
    latent_norm: str = "kv_a_layernorm"
    latent_out: str = "kv_b_proj"
    indexer: str = "indexer"  # its own are below this name
    index_queries: str = "wq_b"
    index_key: str = "wk"
    index_norm: str = "k_norm"
    index_weights: str = "weights_proj"
    # K^T and V of all heads, if they are two tensors; "": both are in `latent_out`.
    keys_out: str = ""
    values_out: str = ""


@dataclass(frozen=True, kw_only=True)
class LayerInputNames:
    """The names of the tensors of inputs for each layer in checkpoints: of the whole model, and
    below a layer."""

    table: str = "model.embed_tokens_per_layer"
    projection: str = "model.per_layer_model_projection"
    norm: str = "model.per_layer_projection_norm"
    gate: str = "per_layer_input_gate"
    out: str = "per_layer_projection"
    post_norm: str = "post_per_layer_input_norm"


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """The names of the tensors in checkpoints. Tensors of a layer are below `layers` and its
    number. Several parts under one name are one tensor, with the rows of one part after the other.
    """

    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # or one name
    latent: LatentNames = LatentNames()
    # In the one tensor, the rows of a KV head's queries, key and value are consecutive.
    qkv_by_head: bool = False
    out: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    sinks: str = "sinks"
    mlp: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")  # or one name; without a gate: that of up
    down: str = "down_proj"
    cross: str = "encoder_attn"
    cross_queries: str = "q_proj"
    attention_norm: str = "input_layernorm"
    cross_norm: str = "encoder_attn_layer_norm"
    attention_post_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = "post_feedforward_layernorm"
    norm: str = "model.norm"  # the last norm
    embedding: str = "model.embed_tokens"
    embedding_norm: str = ""  # of the output of the embedding; "": there is none
    positions: str = "model.embed_positions"
    layers: str = "model.layers"
    experts: ExpertNames = ExpertNames()
    state: StateNames = StateNames()
    layer_inputs: LayerInputNames = LayerInputNames()
    layer_factor: str = "layer_scalar"
    unread: tuple[str, ...] = ()  # beginnings of the names of tensors of a layer that it leaves out


@dataclass(frozen=True, kw_only=True)
class CrossSpec:
    """After its own attention, every layer attends to the vectors of an encoder, which are the same
    for all tokens of a request."""

    num_positions: int  # vectors of the encoder


@dataclass(frozen=True, kw_only=True)
class LayerInputSpec:
    """Inputs for each layer: a vector of a token for every layer, which is the sum of a row of a
    table and of a projection of the token's embedding. At its end, a layer adds
    norm(out(activation(gate(x)) * vector)). Source: Gemma 3n."""

    size: int  # of the vector of one layer
    activation: str = "gelu_pytorch_tanh"  # one of ops.elementwise.ACTIVATIONS
    unknown_token: int = 0  # its row is that of positions without a token, as pictures have
    num_rows: int = (
        0  # of the table; tokens from there on have the first row; 0: all have their own
    )


@dataclass(frozen=True, kw_only=True)
class AltUpSpec:
    """Several versions of a token's hidden state, the streams: a layer predicts all, computes one,
    and corrects all by what that became (AltUp). Beside attention there is a product of low rank
    (LAuReL). Sources: arXiv:2301.13310, arXiv:2411.07501."""

    num: int
    active: int  # the stream that layers compute
    rank: int  # of the product beside attention
    scales_output: bool  # the layer's inputs are gated by a stream that is multiplied by a vector


class RowFactor(NamedTuple):
    num_rows: int  # consecutive rows of the tensor; 0: all others
    factor: float


class TensorFactors(NamedTuple):
    """A tensor of a layer that is multiplied by fixed numbers, other ones for some of its rows."""

    name: str  # below the layer, as "mlp.down_proj.weight"
    rows: tuple[RowFactor, ...]


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    layers: tuple[LayerSpec, ...] = (LayerSpec(),)  # repeated if the model has more layers
    norm: NormKind = NormKind.RMS  # kind of all norms
    last_eps: float = 0.0  # eps of the last norm; 0: that of `ModelConfig`
    names: TensorNames = TensorNames()
    factors: tuple[TensorFactors, ...] = ()  # of tensors of every layer
    embedding_scale: float = 1.0
    # After each of the first `deepstack` layers, further vectors of pictures are added to the
    # hidden states of their tokens. Source: arXiv:2406.04334.
    deepstack: int = 0
    layer_inputs: LayerInputSpec | None = None
    altup: AltUpSpec | None = None  # None: a token has one hidden state
    cross: CrossSpec | None = None  # None: no layer attends to an encoder's vectors
    num_positions: int = 0  # learnt vectors of positions, added to the embeddings; 0: none
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_cap: float = 0.0  # logits become cap * tanh(logits / cap); 0: no cap

    def layer(self, index: int) -> LayerSpec:
        return self.layers[index % len(self.layers)]


def first_difference(one: Any, other: Any, name: str = "layers") -> tuple[str, Any, Any]:
    """The first field in which two descriptions differ: its name and both values."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        for mine, theirs in zip(one, other, strict=True):
            if mine != theirs:
                return first_difference(mine, theirs, name)
    if type(one) is type(other) and isinstance(one, DecoderSpec | LayerSpec | AttentionSpec):
        for each in fields(one):
            mine = getattr(one, each.name)
            theirs = getattr(other, each.name)
            if mine != theirs:
                return first_difference(mine, theirs, each.name)
    return name, one, other

"""Self-attention of a decoder: the projections. `PagedAttention` does the norms of heads, the
rotation, the KV cache and the softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.config.decoder import QkNorm
from weft.config.model import ModelConfig
from weft.models.layers.distances import Biases
from weft.models.layers.linear import INPUTS, HeadwiseLinear, Linear
from weft.models.layers.norm import RmsNorm
from weft.models.layers.rope import Rope, RotaryTables
from weft.models.layers.weight import Weights, vector
from weft.ops.elementwise import rms_norm
from weft.ops.protocol import Divided, Norm, Ops, Shard


class Chooser(NamedTuple):
    """How an indexer chooses the keys that a token attends to (`IndexerSpec`). In qkv, its columns
    come after those of the heads: queries [heads, head_dim], a key [head_dim], weights [heads]."""

    heads: int
    head_dim: int
    num_chosen: int
    rope: Rope  # rotates its queries and its key

    @property
    def size(self) -> int:
        """Number of its columns."""
        return (self.heads + 1) * self.head_dim + self.heads


class Heads(NamedTuple):
    """The work on queries and keys between the projections and attention."""

    rope: Rope | None  # None: queries and keys are not rotated
    q_norm: Norm | None  # applied to each head
    k_norm: Norm | None
    scale: float = 0.0  # factor of scores; 0: 1 / sqrt(D)
    cap: float = 0.0  # cap of scores; 0: no cap
    # [heads] float32: attention sinks, a score per head that joins the sum of its softmax and has
    # no value.
    sinks: Tensor | None = None
    is_gated: bool = False  # in qkv, the gate of each query head follows the head
    norms_rotated: bool = False  # heads are normed after the rotation, not before
    # Eps of the norm of values, which has no weight and is applied to each head; 0: no norm.
    value_eps: float = 0.0
    reads_earlier: bool = False  # qkv has queries alone: K and V are those of an earlier layer
    values_are_keys: bool = False  # qkv has no values: they are the keys, as they come
    biases: Biases | None = None  # added to scores, by distance
    narrows: bool = False  # no later layer stores anything (`PagedAttention.narrow`)
    sees_later: bool = True  # False: tokens see none after them, whatever the step says
    chooser: Chooser | None = None  # None: a token attends to all that it sees

    def score_scale(self, head_dim: int) -> float:
        return self.scale or 1 / math.sqrt(head_dim)

    def prepare(
        self,
        q: Tensor,
        k: Tensor,
        tables: RotaryTables | None,
    ) -> tuple[Tensor, Tensor]:
        """Norm and rotate q and k [T, heads, D], in torch. `tables` are the tables of `rope` for
        this step."""
        if not self.norms_rotated:
            q, k = self._normed(q, k)
        if self.rope is not None and tables is not None:
            q, k = self.rope.rotate(q, k, tables)
        if self.norms_rotated:
            q, k = self._normed(q, k)
        return q, k

    def norm_values(self, v: Tensor) -> Tensor:
        """v [T, heads, D], normed if the layer norms its values."""
        if not self.value_eps:
            return v
        return F.rms_norm(v, (v.shape[-1],), eps=self.value_eps)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is not None:
            q = rms_norm(q, *self.q_norm)
        if self.k_norm is not None:
            k = rms_norm(k, *self.k_norm)
        return q, k


class PagedAttention(Protocol):
    """Attention over the cached tokens of this step's requests."""

    def forward(
        self,
        qkv: Tensor,
        heads: Heads,
        layer: int,
    ) -> Tensor:
        """Norm and rotate queries and keys, store keys and values of this step's tokens, attend.

        qkv [T, (heads + 2 kv_heads) D] (may be overwritten) -> [T, heads D]. With gates, qkv has 2
        D for each query head; with latents (MLA), or if keys are values, it has no values; in a
        layer that reads the K and V of an earlier one, it has neither. Each token attends to the
        cached tokens of its request, and to this step's tokens of its request up to itself, within
        the layer's window.
        """
        ...

    def narrow(self, x: Tensor) -> Tensor:
        """x [T, n] with the rows of the tokens alone that the rest of the model computes: [N, n].

        What the last layer that stores something has stored is all that other tokens are needed
        for; only those after which one is sampled go on. `forward` of that layer returns N rows
        already, if its `Heads` say that it narrows. x may be overwritten. A backend may keep all
        tokens: N = T.
        """
        ...


class Attention:
    """out(attention(qkv(x)))"""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        rope: Rope | None,
        ops: Ops,
        biases: Biases | None = None,
    ) -> None:
        spec = config.decoder.layer(layer).attention
        names = config.decoder.names
        kv_heads, head_dim = config.kv_shape(layer)
        q_size = config.num_heads * head_dim
        kv_size = kv_heads * head_dim
        q_rows = 2 * q_size if spec.gate else q_size
        self._ops = ops
        self._names = names
        self._ends = (q_rows, q_rows + kv_size)  # ends of queries and of keys in a row of qkv
        self._layer = layer
        sizes = [q_rows, kv_size, kv_size]
        if spec.kv_of is not None:
            sizes = [q_rows]
        elif spec.values_are_keys:
            sizes = [q_rows, kv_size]
        self.qkv = _projection(config, layer, sizes, ops)
        self.out = Linear(
            q_size,
            {names.out: config.hidden_size},
            spec.out_bias,
            ops,
            shard=INPUTS,
        )
        self.q_norm: RmsNorm | None = None
        self.k_norm: RmsNorm | None = None
        # The kernels read sinks as float32.
        sinks = ops.vector(config.num_heads, exact=True) if spec.sinks else None
        self._sinks = sinks
        self._heads = Heads(
            rope,
            None,
            None,
            spec.scale,
            spec.score_cap,
            None if sinks is None else ops.of_heads(sinks),
            spec.gate,
            value_eps=config.norm_eps if spec.norms_values else 0.0,
            reads_earlier=spec.kv_of is not None,
            values_are_keys=spec.values_are_keys,
            biases=biases,
            narrows=layer == config.last_storing_layer,
            sees_later=spec.sees_later,
        )
        self._keys_without_bias = ""
        if spec.qkv_bias and not spec.key_bias:
            # The projections are one matrix, which has a bias: zeros change nothing.
            self._keys_without_bias = f"{names.qkv[1]}.bias"
            self.qkv.matrix.put_bias(1, torch.zeros(kv_size))
        self._norms_whole = spec.qk_norm is QkNorm.ALL_HEADS
        assert not (self._norms_whole and spec.gate), "gates stand between the heads of the norm"
        self._norms_weigh = spec.qk_norm_weight
        if spec.qk_norm is QkNorm.NONE:
            return
        kind = config.decoder.norm

        def norm(size: int) -> RmsNorm:
            return RmsNorm(size, config.norm_eps, ops, kind=kind)

        # A norm over all heads together needs the whole row, so it runs before attention. A norm
        # over each head runs inside attention, in the pass that rotates.
        if self._norms_whole:
            self.q_norm = norm(q_size)
            self.k_norm = norm(kv_size)
            return
        self.q_norm = norm(head_dim)
        if not self._norms_weigh:
            self.q_norm.norm.weight.fill_(1)  # the kernels always read one
        self._heads = self._heads._replace(
            q_norm=self.q_norm.norm,
            norms_rotated=spec.qk_norm is QkNorm.ROTATED_HEAD,
        )
        if spec.kv_of is None:
            self.k_norm = norm(head_dim)
            if not self._norms_weigh:
                self.k_norm.norm.weight.fill_(1)
            self._heads = self._heads._replace(k_norm=self.k_norm.norm)

    def __call__(self, x: Tensor, attention: PagedAttention) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        qkv = self._ops.computed(self.qkv(x))
        if self._norms_whole and self.q_norm is not None and self.k_norm is not None:
            q_end, k_end = self._ends
            self._ops.norm_overwrites(qkv[:, :q_end], self.q_norm.norm)
            self._ops.norm_overwrites(qkv[:, q_end:k_end], self.k_norm.norm)
        return self.out(attention.forward(qkv, self._heads, self._layer))

    def weights(self, prefix: str) -> Weights:
        for weight in self.qkv.weights(prefix):
            if weight.name != f"{prefix}.{self._keys_without_bias}":
                yield weight
        yield from self.out.weights(prefix)
        if self._sinks is not None:
            yield vector(f"{prefix}.{self._names.sinks}", self._sinks)
        if not self._norms_weigh:
            return
        if self.q_norm is not None:
            yield from self.q_norm.weights(f"{prefix}.{self._names.q_norm}")
        if self.k_norm is not None:
            yield from self.k_norm.weights(f"{prefix}.{self._names.k_norm}")


def _projection(
    config: ModelConfig,
    layer: int,
    sizes: Sequence[int],
    ops: Ops,
) -> Linear:
    """The projection to queries, keys and values, which are one tensor in some checkpoints. Some
    layers have fewer of them."""
    names = config.decoder.names
    kv_heads, head_dim = config.kv_shape(layer)
    bias = config.decoder.layer(layer).attention.qkv_bias
    hidden = config.hidden_size
    shard = Shard(Divided.OUTPUTS, unit=head_dim)
    if len(names.qkv) > 1:
        parts = dict(zip(names.qkv, sizes, strict=False))
        return Linear(hidden, parts, bias, ops, shard=shard)
    # In one tensor: one after the other, or interleaved by head.
    num_runs = kv_heads if names.qkv_by_head else 1
    return HeadwiseLinear(hidden, names.qkv[0], tuple(sizes), num_runs, bias, ops, shard=shard)

"""EAGLE-3: one layer of Llama whose attention reads the embedding of a token beside the state of
the token before it. Source: arXiv:2503.01840."""

from __future__ import annotations

from torch import Tensor

from weft.config.decoder import MlpSpec, NormKind
from weft.config.heads import HeadSpec
from weft.config.model import ModelConfig
from weft.models.heads.beside import NormedPart, beside, copy_rows
from weft.models.heads.protocol import Spread
from weft.models.layers.attention import Heads, PagedAttention
from weft.models.layers.embedding import VOCABULARY, Embedding
from weft.models.layers.head import LmHead
from weft.models.layers.linear import INPUTS, Linear
from weft.models.layers.mlp import make_mlp
from weft.models.layers.norm import RmsNorm
from weft.models.layers.rope import Rope
from weft.models.layers.weight import Weights
from weft.ops.protocol import Divided, Ops, Shard


class Eagle3:
    """The `HeadModel` of these checkpoints. The embedding is that of the model."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        embedding: Embedding,
        ids: Tensor | None,
        spread: Spread,
    ) -> None:
        """`ids`: the tokens that it can guess, [num_logits] rising; None: all."""
        assert config.head is not None
        spec: HeadSpec = config.head
        layer = config.decoder.layer(0)
        assert isinstance(layer.mlp, MlpSpec)
        hidden = config.hidden_size
        kv_heads, head_dim = config.kv_shape(0)
        self._ops = ops
        self._spec = spec
        self._embedding = embedding
        self._ids = ids
        self._spread = spread

        def norm() -> RmsNorm:
            return RmsNorm(hidden, config.norm_eps, ops, kind=NormKind.RMS)

        self._fc = Linear(spec.width, {"fc": hidden}, False, ops)
        self._embedding_norm = norm()
        self._state_norm = norm()
        self._feed_norm = norm()
        self._norm = norm()
        sizes = {
            "q_proj": config.num_heads * head_dim,
            "k_proj": kv_heads * head_dim,
            "v_proj": kv_heads * head_dim,
        }
        bias = layer.attention.qkv_bias
        by_heads = Shard(Divided.OUTPUTS, unit=head_dim)
        self._qkv = Linear(2 * hidden, sizes, bias, ops, shard=by_heads)
        self._out = Linear(
            sizes["q_proj"], {"o_proj": hidden}, layer.attention.out_bias, ops, shard=INPUTS
        )
        rope = layer.attention.rope
        self._heads = Heads(None if rope is None else Rope(rope, config, head_dim), None, None)
        self._mlp = make_mlp(config, layer.mlp, ops)
        self._head = LmHead(
            ops.matrix(hidden, (spec.num_logits,), precise=True, shard=VOCABULARY),
            (spec.num_logits, hidden),
            "lm_head",
            ops,
        )

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        received: Tensor,
        *,
        is_first: bool,
    ) -> Tensor:
        ops = self._ops
        hidden = self._embedding.shape[1]
        state = received
        if is_first:
            state = ops.computed(self._fc(received))
        embedded = ops.computed(self._embedding.with_ops(ops, tokens))
        both = beside(
            ops, NormedPart(embedded, self._embedding_norm), NormedPart(state, self._state_norm)
        )
        x = state
        if self._spec.adds_to_normed:
            x = ops.space(state, hidden)
            copy_rows(ops, both[:, hidden:], x)
        qkv = ops.computed(self._qkv(both))
        x = x + self._out(attention.forward(qkv, self._heads, 0))
        x = x + self._mlp(self._feed_norm(x))
        return ops.computed(x)

    def logits(self, hidden: Tensor, places: Tensor | None = None) -> Tensor:
        rows = hidden if places is None else hidden.index_select(0, places)
        logits = self._head(self._norm(rows), places)
        # A rank that follows has only a part of them, which nothing reads.
        if self._ids is None or logits.shape[1] != len(self._ids):
            return logits
        return self._spread(logits, self._ids, self._embedding.shape[0])

    def weights(self) -> Weights:
        layer = self._spec.layer
        yield from self._without_prefix()
        yield from self._embedding_norm.weights(f"{layer}.input_layernorm")
        yield from self._state_norm.weights(f"{layer}.hidden_norm")
        yield from self._qkv.weights(f"{layer}.self_attn")
        yield from self._out.weights(f"{layer}.self_attn")
        yield from self._feed_norm.weights(f"{layer}.post_attention_layernorm")
        yield from self._mlp.weights(f"{layer}.mlp")
        yield from self._norm.weights("norm")
        yield from self._head.weights()

    def _without_prefix(self) -> Weights:
        for weight in self._fc.weights(""):
            yield weight._replace(name=weight.name.removeprefix("."))

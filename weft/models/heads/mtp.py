"""MTP: a layer of the model's own kind after its last one, which predicts one token more. It reads
the embedding of a token and the state of the token before it, both normed, through one projection;
embedding and head are the model's. Source: arXiv:2412.19437, section 2.2."""

from __future__ import annotations

from torch import Tensor

from weft.config.model import ModelConfig
from weft.models.decoder import Decoder, DecoderLayer
from weft.models.heads.beside import NormedPart, beside
from weft.models.layers.attention import PagedAttention
from weft.models.layers.linear import Linear
from weft.models.layers.norm import RmsNorm, make_norm
from weft.models.layers.rope import Rope
from weft.models.layers.weight import Weights
from weft.ops.protocol import Norm, Ops


class Mtp:
    """The `HeadModel` of these layers."""

    def __init__(self, config: ModelConfig, ops: Ops, model: Decoder) -> None:
        """`model` is the one that it guesses for."""
        assert config.head is not None
        assert config.head.mtp is not None
        assert model.head is not None
        self._names = config.head.mtp
        self._ops = ops
        self._embedding = model.embedding
        self._head = model.head
        self._model_norm: Norm | None = None
        if self._names.reads_normed:
            assert isinstance(model.norm, RmsNorm)
            self._model_norm = model.norm.norm
        self._embedding_norm = _rms_norm(config, ops)
        self._state_norm = _rms_norm(config, ops)
        self._norm = _rms_norm(config, ops)
        self._projection = Linear(
            2 * config.hidden_size, {self._names.projection: config.hidden_size}, False, ops
        )
        spec = config.decoder.layer(0)
        rope = None
        if spec.attention.rope is not None:
            _, head_dim = config.kv_shape(0)
            rope = Rope(spec.attention.rope, config, head_dim)
        self._layer = DecoderLayer(config, 0, rope, ops, None, None)

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
        norm = self._model_norm if is_first else self._norm.norm
        state = received if norm is None else ops.computed(ops.norm(received, norm))
        embedded = ops.computed(self._embedding.with_ops(ops, tokens))
        parts = [NormedPart(embedded, self._embedding_norm), NormedPart(state, self._state_norm)]
        if not self._names.embedding_first:
            parts.reverse()
        both = beside(ops, *parts)
        x = ops.computed(self._projection(both))
        return ops.computed(self._layer(x, attention))

    def logits(self, hidden: Tensor, places: Tensor | None = None) -> Tensor:
        rows = hidden if places is None else hidden.index_select(0, places)
        return self._head.with_ops(self._ops, self._norm(rows), places)

    def weights(self) -> Weights:
        names = self._names
        yield from self._embedding_norm.weights(f"{names.prefix}.{names.embedding_norm}")
        yield from self._state_norm.weights(f"{names.prefix}.{names.state_norm}")
        yield from self._projection.weights(names.prefix)
        yield from self._layer.weights(names.layer)
        yield from self._norm.weights(f"{names.prefix}.{names.norm}")


def _rms_norm(config: ModelConfig, ops: Ops) -> RmsNorm:
    norm = make_norm(config, config.hidden_size, ops)
    assert isinstance(norm, RmsNorm), "models with this layer have such norms"
    return norm

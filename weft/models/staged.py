"""The layers of a decoder in one pipeline stage: the stage begins with the output of the previous
stage, and ends before the first layer of the next one."""

from __future__ import annotations

from torch import Tensor

from weft.config.model import ModelConfig
from weft.models.decoder import Decoder
from weft.models.layers.attention import PagedAttention
from weft.models.layers.states import LayerStates
from weft.models.layers.weight import Weights
from weft.ops.protocol import Ops
from weft.ops.stages import AbsentOps, Handover, StagePlace


class StagedDecoder:
    """The `LayeredModel` of a stage. Calls use layer numbers of the whole model; layers of other
    stages leave `carried` unchanged."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        states: LayerStates | None,
        *,
        place: StagePlace,
        handover: Handover,
    ) -> None:
        self._place = place
        self._layers = place.layers(config.num_layers)
        self._num_layers = config.num_layers
        self._hidden_size = config.hidden_size
        self._handover = handover
        self._ops = ops
        self._decoder = Decoder(config, ops, states, MadeHere(config, ops, place))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        vectors: Tensor | None = None,
    ) -> Tensor:
        return self.run_layers(0, self._num_layers, None, tokens, positions, attention, vectors)

    def run_layers(
        self,
        first: int,
        last: int,
        carried: Tensor | None,
        tokens: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        vectors: Tensor | None = None,
    ) -> Tensor:
        x = carried
        if x is None and not self._place.is_first:
            x = self._handover.take(len(tokens), self._hidden_size)
        begin = max(first, self._layers.start)
        end = min(last, self._layers.stop)
        if begin < end:
            x = self._decoder.run_layers(begin, end, x, tokens, positions, attention, vectors)
            if end == self._layers.stop and not self._place.is_last:
                x = self._handover.give(x)
        assert x is not None, "the first layer is one of the first stage"
        return self._ops.computed(x)

    def normed(self, hidden: Tensor) -> Tensor:
        return self._decoder.normed(hidden)

    def logits(self, hidden: Tensor, places: Tensor | None = None) -> Tensor:
        """Only on the last stage."""
        return self._decoder.logits(hidden, places)

    def weights(self) -> Weights:
        return self._decoder.weights()


class MadeHere:
    """The `Ops` with which each part of a decoder is made: those that compute, or `AbsentOps` for
    parts of other stages."""

    def __init__(self, config: ModelConfig, ops: Ops, place: StagePlace) -> None:
        elsewhere = AbsentOps()
        here = place.layers(config.num_layers)
        has_table = place.is_first or (place.is_last and config.tie_embeddings)
        self.embedding: Ops = ops if has_table else elsewhere
        self.head: Ops = ops if place.is_last else elsewhere
        self._layers = [ops if layer in here else elsewhere for layer in range(config.num_layers)]

    def layer(self, layer: int) -> Ops:
        return self._layers[layer]

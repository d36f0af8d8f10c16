"""Which class implements which architecture, and what every model can do.

To add a family of decoders: what its `config.json` means, in `config/families/`. It needs nothing
here, unless it has a mechanism that `decoder.py` lacks. Architectures that nobody added are
computed by `transformers_backend/`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

from torch import Tensor

from weft.config.model import FAMILIES, ModelConfig, UnsupportedModel
from weft.models.layers.attention import PagedAttention
from weft.models.layers.encoder import BidirectionalAttention
from weft.models.layers.states import LayerStates
from weft.models.layers.weight import Weights
from weft.ops.encoder import EncoderOps
from weft.ops.protocol import Ops

_DECODER = "weft.models.decoder:Decoder"
# Of any architecture whose code is that of the package transformers.
_BY_LIBRARY = "weft.models.transformers_backend.model:TransformersModel"
_ENCODERS = {
    "Bert": "weft.models.bert:Bert",
    "Roberta": "weft.models.bert:roberta",
    "XLMRoberta": "weft.models.bert:roberta",
}


def _places() -> dict[str, str]:
    """Module and name of the class of each architecture that is read."""
    found = dict.fromkeys(FAMILIES, _DECODER)
    for name, place in _ENCODERS.items():
        found[f"{name}Model"] = place
        found[f"{name}ForSequenceClassification"] = place
    return found


MODELS = _places()


class DecoderModel(Protocol):
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        vectors: Tensor | None = None,
    ) -> Tensor:
        """Run the tokens of one step: tokens [T] and positions [T] (int64) -> hidden states [T,
        hidden], as the last layer leaves them, before the final norm.

        A token below 0 is no row of the embedding: the first layer gets row -1 - token of `vectors`
        [.., hidden] (float32, None if there is no such token) for it. Of a model with deepstack
        rows may be longer: `Ops.add_vectors` adds the rest.
        """
        ...

    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, hidden] -> the same behind the final norm, as the head reads them; good
        until the model is called again."""
        ...

    def logits(self, hidden: Tensor, places: Tensor | None = None) -> Tensor:
        """Hidden states [T, hidden] of the tokens of a step -> of those at `places` [S] (None: of
        all) [S, vocab], float32. Of a classifier: the scores [S, labels] of prompts, from the
        hidden states that stand for them."""
        ...

    def weights(self) -> Weights:
        """Every tensor that the model wants from a checkpoint."""
        ...


class LayeredModel(DecoderModel, Protocol):
    """A model that may stop between two layers and go on later."""

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
        """As `forward`, of the layers first..last-1: `carried` [T, hidden], what the layer before
        left of the tokens -> what the last of these leaves; good until the model is called again.
        None: the first layer follows the embedding."""
        ...


class EncoderModel(Protocol):
    """A model whose tokens see the whole prompt, and which therefore has no KV. The rest is as in
    `DecoderModel`."""

    def forward(
        self, tokens: Tensor, positions: Tensor, types: Tensor, attention: BidirectionalAttention
    ) -> Tensor:
        """Run whole prompts, one behind the other: tokens, positions and kinds of segment, each [T]
        (int64) -> hidden states [T, hidden]."""
        ...

    def logits(self, hidden: Tensor, places: Tensor | None = None) -> Tensor: ...

    def normed(self, hidden: Tensor) -> Tensor: ...

    def weights(self) -> Weights: ...


def make_encoder(config: ModelConfig, ops: EncoderOps) -> EncoderModel:
    """An encoder whose weights have no content yet. Raises `UnsupportedModel`."""
    return cast(EncoderModel, make_model(config, ops))


def make_model(
    config: ModelConfig,
    ops: Ops,
    states: LayerStates | None = None,
) -> DecoderModel:
    """A model whose weights have no content yet; `states`: those of its layers that keep one.
    Raises `UnsupportedModel`."""
    place = _BY_LIBRARY if config.library_config else MODELS.get(config.architecture)
    if place is None:
        raise UnsupportedModel(
            f"architecture {config.architecture!r} is not supported; "
            f"supported are {', '.join(MODELS)}"
        )
    module, _, name = place.partition(":")
    make = getattr(import_module(module), name)
    if states is not None:
        return cast(DecoderModel, make(config, ops, states))
    return cast(DecoderModel, make(config, ops))

"""The class of each architecture, and the interface of all models.

To add a family, describe the meaning of its `config.json` in `config/families/`. It
needs nothing here, unless it has a mechanism that `decoder.py` lacks. `transformers_backend/`
computes architectures that are not listed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

from torch import Tensor

from weft.config.model import FAMILIES, ModelConfig, UnsupportedModel
from weft.models.layers.attention import PagedAttention
from weft.models.layers.cross import EncodedKv
from weft.models.layers.encoder import BidirectionalAttention
from weft.models.layers.kept import KeepStates
from weft.models.layers.states import LayerStates
from weft.models.layers.weight import Weights
from weft.ops.encoder import EncoderOps
from weft.ops.protocol import Ops

_DECODER = "weft.models.decoder:Decoder"
# For any architecture that runs with the code of the package transformers.
_BY_LIBRARY = "weft.models.transformers_backend.model:TransformersModel"
_ENCODER = "weft.models.encoder:Encoder"


def model_places() -> dict[str, str]:
    """Module and class of each known architecture."""
    return {name: _ENCODER if family.is_encoder else _DECODER for name, family in FAMILIES.items()}


class DecoderModel(Protocol):
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        vectors: Tensor | None = None,
    ) -> Tensor:
        """Run the tokens of one step: tokens [T] and positions [T] (int64) -> hidden states [T,
        hidden] of the last layer, before the final norm.

        A token below 0 is not a row of the embedding: the first layer gets row -1 - token of
        `vectors` [.., hidden] (float32; None if there is no such token). For a model with
        deepstack, rows may be longer: `Ops.add_vectors` adds the rest.
        """
        ...

    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, hidden] -> the same after the final norm, as the head reads them; valid
        until the next call of the model."""
        ...

    def logits(self, hidden: Tensor, places: Tensor | None = None) -> Tensor:
        """Hidden states [T, hidden] of a step's tokens -> logits [S, vocab], float32, of the tokens
        at `places` [S] (None: all). A classifier: scores [S, labels] of prompts, from the hidden
        states that represent them."""
        ...

    def weights(self) -> Weights:
        """Every tensor that the model needs from a checkpoint."""
        ...


class LayeredModel(DecoderModel, Protocol):
    """A model that can stop between two layers and continue later."""

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
        """Like `forward`, for the layers first..last-1: `carried` [T, hidden], the output of the
        layer before `first`, -> the output of layer last-1; valid until the next call of the model.
        None: the first layer follows the embedding."""
        ...


class EncoderModel(Protocol):
    """A model whose tokens attend to the whole prompt, and which therefore has no KV. The rest is
    as in `DecoderModel`."""

    def forward(
        self, tokens: Tensor, positions: Tensor, types: Tensor, attention: BidirectionalAttention
    ) -> Tensor:
        """Run whole prompts, one after the other: tokens, positions and segment types, each [T]
        (int64) -> hidden states [T, hidden]."""
        ...

    def logits(self, hidden: Tensor, places: Tensor | None = None) -> Tensor: ...

    def normed(self, hidden: Tensor) -> Tensor: ...

    def weights(self) -> Weights: ...


def make_encoder(config: ModelConfig, ops: EncoderOps) -> EncoderModel:
    """Make an encoder whose weights are not loaded yet. Raises `UnsupportedModel`."""
    return cast(EncoderModel, make_model(config, ops))


def make_model(
    config: ModelConfig,
    ops: Ops,
    states: LayerStates | None = None,
    encoded: EncodedKv | None = None,
    kept: KeepStates | None = None,
) -> DecoderModel:
    """Make a model whose weights are not loaded yet. `states` holds the states of layers that keep
    one, `encoded` what layers read of an encoder, `kept` what a head reads. Raises
    `UnsupportedModel`."""
    addresses = model_places()
    address = _BY_LIBRARY if config.library_config else addresses.get(config.architecture)
    if address is None:
        raise UnsupportedModel(
            f"architecture {config.architecture!r} is not supported; "
            f"supported are {', '.join(addresses)}"
        )
    module, _, name = address.partition(":")
    make = getattr(import_module(module), name)
    parts = {"states": states, "encoded": encoded, "kept": kept}
    more = {name: part for name, part in parts.items() if part is not None}
    return cast(DecoderModel, make(config, ops, **more))

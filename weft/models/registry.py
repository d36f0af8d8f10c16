"""Which class implements which architecture, and what every model can do.

To add a model: its class and a line here; in `config/model.py` a line of `FAMILIES` for what its `config.json` means.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

from torch import Tensor

from weft.config.model import ModelConfig, UnsupportedModel
from weft.models.layers.attention import PagedAttention
from weft.models.layers.weight import Weights
from weft.ops.protocol import Ops

MODELS = {
    "LlamaForCausalLM": "weft.models.llama:Llama",
    "MistralForCausalLM": "weft.models.llama:Llama",
    "Qwen2ForCausalLM": "weft.models.llama:Llama",
    "Qwen3ForCausalLM": "weft.models.llama:Llama",
}


class Model(Protocol):
    def forward(self, tokens: Tensor, positions: Tensor, attention: PagedAttention) -> Tensor:
        """Run the tokens of one step: tokens [T] and positions [T] (int64) -> hidden states [T, hidden], as the last
        layer leaves them, before the final norm."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [S, hidden] of the tokens that need logits -> [S, vocab], float32."""
        ...

    def weights(self) -> Weights:
        """Every tensor that the model wants from a checkpoint."""
        ...


def make_model(config: ModelConfig, ops: Ops) -> Model:
    """A model whose weights have no content yet. Raises `UnsupportedModel`."""
    if config.architecture not in MODELS:
        raise UnsupportedModel(
            f"architecture {config.architecture!r} is not supported; supported are {', '.join(MODELS)}"
        )
    module, _, name = MODELS[config.architecture].partition(":")
    return cast(Model, getattr(import_module(module), name)(config, ops))

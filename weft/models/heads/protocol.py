"""What a head is to those who run it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from weft.models.layers.attention import PagedAttention
from weft.models.layers.weight import Weights


class Spread(Protocol):
    """Gives logits of some tokens the shape of those of all."""

    def __call__(self, x: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
        """x [S, num], of the tokens `ids` [num] (int64, rising) -> [S, vocab], -inf for all
        others."""
        ...


class HeadModel(Protocol):
    """A head. Its sequence is one token shorter than that of the model: at a position it reads what
    the model has made of the token there, and the id of the token after it."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        received: Tensor,
        *,
        is_first: bool,
    ) -> Tensor:
        """Run the tokens of one pass, [T] -> [T, hidden], which a later pass may get.

        `received`: in the first pass what was kept of the model's step, [T, width]; in later ones
        what this function has returned for the token before, [T, hidden]. It may be overwritten.
        """
        ...

    def logits(self, hidden: Tensor, places: Tensor | None = None) -> Tensor:
        """What `forward` has returned, [T, hidden] -> logits [S, vocab], float32, of the tokens at
        `places` [S] (None: all)."""
        ...

    def weights(self) -> Weights:
        """Every tensor that the head needs from its checkpoint."""
        ...

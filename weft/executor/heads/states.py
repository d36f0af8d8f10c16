"""The hidden states that a head reads: those of the model by slot, so that they follow the K and V
of a token wherever its page is shared; and the head's own, by row, from one pass to the next."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.config.heads import HeadSpec
from weft.executor.backend import AttentionBatch
from weft.executor.kv_pool import zeros


class HiddenPool:
    """Room for the states of `num_slots` tokens and `max_rows` rows."""

    def __init__(
        self,
        spec: HeadSpec,
        hidden_size: int,
        *,
        num_slots: int,
        max_rows: int,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.kept = zeros((num_slots, spec.width), torch.bfloat16, device)
        # What the head has made of the last token of each row.
        self.carried = zeros((max_rows, hidden_size), torch.float32, device)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.kept, self.carried]

    def columns_of(self, layer: int) -> list[slice]:
        """The columns of `kept` for the input of a layer, which may be read more than once."""
        size = self.spec.read_size
        places = [place for place, read in enumerate(self.spec.reads) if read == layer]
        return [slice(place * size, (place + 1) * size) for place in places]


class PlainKept:
    """`KeepStates` in torch."""

    def __init__(self, pool: HiddenPool) -> None:
        self._pool = pool
        self._slots = torch.empty(0, dtype=torch.int64)

    def prepare(self, batch: AttentionBatch) -> None:
        """Begin a step."""
        self._slots = batch.slots

    def reads(self, layer: int) -> bool:
        return layer in self._pool.spec.reads

    def keep(self, x: Tensor, layer: int) -> None:
        kept = self._pool.kept
        for columns in self._pool.columns_of(layer):
            kept[self._slots, columns] = x.to(kept.dtype)


def plain_spread(x: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """`Spread` in torch."""
    logits = x.new_full((len(x), vocab_size), float("-inf"))
    logits[:, ids] = x
    return logits

"""What a request that wants no tokens wants of its prompt instead."""

from __future__ import annotations

import msgspec

from weft.config.numbers import MAX_LABEL_IDS
from weft.messages.sampling import InvalidParam, check_number, check_token_ids


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A vector of the prompt, or scores of labels, as the model gives them; with `label_ids`, of a model that
    generates: the log probabilities of these tokens behind the prompt."""

    normalize: bool | None = (
        None  # a vector to length 1, scores to probabilities; None: as the model's makers meant it
    )
    dimensions: int = 0  # only so many of the first numbers of a vector; 0: all
    token_type_ids: bytes = (
        b""  # uint8 [prompt_len], packed: kind of segment of each token; nothing: all are of kind 0
    )
    label_ids: tuple[int, ...] = ()

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidParam` for the first value out of range; what depends on the model, the engine looks after."""
        if self.dimensions:
            check_number("dimensions", "dimensions", self.dimensions)
        if len(self.label_ids) > MAX_LABEL_IDS:
            message = f"{len(self.label_ids):,} ids; at most {MAX_LABEL_IDS:,} are allowed"
            raise InvalidParam("label_token_ids", message)
        check_token_ids("label_token_ids", self.label_ids, vocab_size)

"""`disallowed_tokens`: a logit processor that forbids tokens. It acts like a logit bias of minus
infinity, without the limit on the number of tokens.

{"custom_logit_processor": "disallowed_tokens", "custom_params": {"token_ids": [17, 42]}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.executor.logit_processors.processor import LogitProcessor, ProcessorRequest


class DisallowedTokens(LogitProcessor):
    def check(self, params: Mapping[str, Any]) -> None:
        ids = params.get("token_ids")
        if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
            raise ValueError("token_ids must be a list of token ids")
        if len(params) > 1:
            raise ValueError(
                f"it has no parameter {min(params.keys() - {'token_ids'})!r}; only token_ids is "
                "allowed"
            )

    def apply(self, logits: Tensor, requests: Sequence[ProcessorRequest]) -> None:
        for row, one in zip(logits, requests, strict=True):
            ids = torch.tensor(one.params["token_ids"], dtype=torch.int64, device=row.device)
            row[ids[ids < len(row)]] = -torch.inf

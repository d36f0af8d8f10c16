"""Vectors of several sources for one step: embeddings of requests, and those of encoders."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def concatenated(vectors: Sequence[Tensor]) -> Tensor:
    """The vectors [n, width] one after the other, as wide as the widest: [sum of n, width].

    An encoder may also add to later layers, in further numbers of its vectors; narrower vectors end
    in zeros, and so add nothing there.
    """
    if len(vectors) == 1:
        return vectors[0]
    width = max(one.shape[1] for one in vectors)
    return torch.cat([F.pad(one, (0, width - one.shape[1])) for one in vectors])

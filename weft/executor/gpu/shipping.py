"""A step as kernels of GPUs read it: as it was sent with everything else, or in a copy of its own."""

from __future__ import annotations

import numpy as np
import torch

from weft.executor.attention_layout import Size, Tiling
from weft.executor.backend import AttentionBatch, Shipped
from weft.ops.triton.paged import PagedStep


def paged_step(batch: AttentionBatch, tiling: Tiling) -> tuple[PagedStep, Size]:
    """What has been shipped, whatever will stand there by the time it is read; or all of it laid out and copied now."""
    arrays, size = batch.shipped or _ship(batch, tiling)
    return PagedStep._make((*arrays, batch.table, size.num_splits)), size


def _ship(batch: AttentionBatch, tiling: Tiling) -> Shipped:
    size = tiling.size(batch.lens)
    slots = np.zeros(size.num_tokens, np.int32)  # they are on the device already
    arrays = tiling.lay_out(batch.rows, batch.starts, batch.lens, slots, size)
    packed = torch.from_numpy(np.concatenate(arrays)).to(batch.table.device)
    *parts, _ = packed.split_with_sizes([len(part) for part in arrays])
    return Shipped((*parts, batch.slots.int()), size)

"""The memory of a KV pool, page by page, for whoever reads files into it and writes files from it.

On a CPU, a page is so many rows of each tensor of the pool: of K and V of each layer, and of their
scales where there are some.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KvPages:
    """Pages of `page_size` slots of tensors [slots, ...] on a CPU. It keeps them alive."""

    def __init__(self, tensors: Sequence[Tensor], page_size: int) -> None:
        self._tensors = tensors
        self._memory: list[tuple[memoryview, int]] = []  # of a tensor, and bytes of a page of it
        for tensor in tensors:
            num_slots = len(tensor)
            if not num_slots:
                continue  # a layer without K and V
            assert tensor.is_contiguous()
            memory = tensor.view(-1).view(torch.uint8).numpy().data
            self._memory.append((memory, len(memory) // num_slots * page_size))
        self.page_bytes = sum(size for _, size in self._memory)

    def pieces(self, page: int) -> list[memoryview]:
        """Where the bytes of a page are, one piece for each tensor."""
        return [memory[page * size : (page + 1) * size] for memory, size in self._memory]

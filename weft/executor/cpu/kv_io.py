"""The memory of a KV pool by pages, for reading files into it and writing files from it.

On a CPU, a page is a number of rows of each tensor of the pool: of K and V of each layer, and of
their scales if there are some.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KvPages:
    """Pages of `page_size` slots of tensors [slots, ...] on a CPU. Keeps the tensors alive."""

    def __init__(self, tensors: Sequence[Tensor], page_size: int) -> None:
        self._tensors = tensors
        # for each tensor: its bytes, and the bytes per page
        self._memory: list[tuple[memoryview, int]] = []
        for tensor in tensors:
            num_slots = len(tensor)
            if not num_slots:
                continue  # a layer without K and V
            assert tensor.is_contiguous()
            memory = tensor.view(-1).view(torch.uint8).numpy().data
            self._memory.append((memory, len(memory) // num_slots * page_size))
        self.page_bytes = sum(size for _, size in self._memory)

    def pieces(self, page: int) -> list[memoryview]:
        """The bytes of a page, one piece for each tensor."""
        return [memory[page * size : (page + 1) * size] for memory, size in self._memory]

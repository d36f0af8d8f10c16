"""The memory of the KV pool, page by page, for stores and for transfers to other servers."""

from __future__ import annotations

from typing import Protocol

MAX_PIECES = 1_024  # limit of one system call: IOV_MAX


class PoolPages(Protocol):
    page_bytes: int

    def pieces(self, page: int) -> list[memoryview]:
        """The memory of a page, one piece for each tensor."""
        ...


def without_first(pieces: list[memoryview], num_bytes: int) -> list[memoryview]:
    """The pieces without their first `num_bytes` bytes."""
    for i, piece in enumerate(pieces):
        if num_bytes < len(piece):
            return [piece[num_bytes:], *pieces[i + 1 :]]
        num_bytes -= len(piece)
    return []

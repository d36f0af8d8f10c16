"""What a store of KV from outside implements: bytes by key, and nothing of models, pages or tokens.

class Shelf(BlockStore):
    def get(self, key): return self.blocks.get(key)
    def put(self, key, block): self.blocks[key] = block
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockStore:
    """A store of blocks. A key has 32 bytes, and the same key always means the same block.

    weft calls `get` on one thread and everything else on another, so a call may take its time: a
    request waits for it no longer than `--cache-wait-ms`, and then computes. Whatever a call raises
    or returns, only its block is not found or not stored. The store decides what it keeps, and for
    how long.
    """

    name = ""  # in `GET /cache`; "": the name of the plugin

    def keys(self) -> Iterable[bytes]:
        """The keys of blocks that are there at the start, also of other models."""
        return ()

    def get(self, key: bytes) -> bytes | None:
        """The block, as `put` got it; None if it is not there any more."""
        raise NotImplementedError

    def put(self, key: bytes, block: bytes) -> None:
        """Store a block. It consists of a header of some kB, and K and V of `--cache-block`
        tokens."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget all blocks (`POST /cache/clear`)."""
        raise NotImplementedError

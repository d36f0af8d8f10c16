"""The blocks in host memory: which are there, in the order of their last use, and which places are
free. The least recently used blocks are dropped when others need their places, except blocks in
transfer. Only the engine's thread uses it."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.arrays import IntArray
from weft.memory.prefix_cache import CacheKey
from weft.tiers.keys import KeyChain


@dataclass(eq=False)
class HostBlock:
    """A block in host memory."""

    places: IntArray  # [pages of a block]
    users: int = 0  # transfers that read it
    is_dropped: bool = False  # not found any more; its last user frees the places


class HostBlocks:
    """`num_host_pages`: pages of host memory; `page_bytes`: bytes of each."""

    def __init__(
        self, num_host_pages: int, page_bytes: int, page_size: int, block_len: int
    ) -> None:
        self.block_len = block_len
        self.block_pages = block_len // page_size
        self.block_bytes = self.block_pages * page_bytes
        self.num_blocks = num_host_pages // self.block_pages
        every = np.arange(self.num_blocks * self.block_pages, dtype=np.int32)
        self.unused = list(every.reshape(self.num_blocks, self.block_pages)[::-1])
        self.by_key: OrderedDict[bytes, HostBlock] = OrderedDict()  # least recently used first
        self.generation = 0
        self.chain = self._new_chain()
        self.is_stopped = False  # no block is added any more
        self.num_dropped = 0  # for lack of space

    def __len__(self) -> int:
        return len(self.by_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self.by_key

    def num_here(self, key: CacheKey, have: int) -> int:
        """Tokens at the beginning of a sequence that are here, or among the first `have`."""
        num_tokens = 0
        for one in self.chain.keys(key):
            if num_tokens + self.block_len > have and one not in self.by_key:
                break
            num_tokens += self.block_len
        return num_tokens

    def note_use(self, keys: Sequence[bytes]) -> None:
        """Mark blocks of a sequence as used: its beginning last, because the rest cannot be found
        without it."""
        for key in reversed(keys):
            if key in self.by_key:
                self.by_key.move_to_end(key)

    def hold(self, keys: Sequence[bytes]) -> list[HostBlock]:
        """The blocks with these keys, up to the first that is not here. A transfer reads them until
        it lets them go."""
        in_use: list[HostBlock] = []
        for key in keys:
            block = self.by_key.get(key)
            if block is None:
                break
            block.users += 1
            in_use.append(block)
        return in_use

    def let_go(self, blocks: Sequence[HostBlock]) -> None:
        """A transfer no longer reads these blocks."""
        for block in blocks:
            block.users -= 1
            if block.is_dropped and not block.users:
                self.unused.append(block.places)

    def take_places(
        self, num_blocks: int, spared: frozenset[bytes] = frozenset()
    ) -> list[IntArray]:
        """Places for `num_blocks` blocks, or for fewer if too many are in use or `spared`."""
        missing = num_blocks - len(self.unused)
        if missing > 0:
            for key, block in list(self.by_key.items()):
                if block.users or key in spared:
                    continue
                del self.by_key[key]
                self.unused.append(block.places)
                self.num_dropped += 1
                missing -= 1
                if missing <= 0:
                    break
        taken: list[IntArray] = []
        while self.unused and len(taken) < num_blocks:
            taken.append(self.unused.pop())
        return taken

    def free(self, places: IntArray) -> None:
        """Places of a block that has not come."""
        self.unused.append(places)

    def add(self, key: bytes, places: IntArray, generation: int) -> HostBlock | None:
        """Add a block. Returns it, or the one that was here already; None if it is out of date."""
        if generation != self.generation or self.is_stopped:
            self.unused.append(places)
            return None
        if key in self.by_key:
            self.unused.append(places)
        else:
            self.by_key[key] = HostBlock(places)
        return self.by_key[key]

    def forget(self) -> None:
        """Drop all blocks that are here or in transfer to here."""
        self.generation += 1
        for block in self.by_key.values():
            if block.users:
                block.is_dropped = True
            else:
                self.unused.append(block.places)
        self.by_key.clear()

    def renew(self) -> None:
        """The weights have changed: drop all blocks, and find none of them again."""
        self.forget()
        self.chain = self._new_chain()

    def _new_chain(self) -> KeyChain:
        """Keys that are unique to these weights and this process."""
        return KeyChain(os.urandom(32), self.block_len)

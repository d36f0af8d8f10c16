"""Which part of a sequence is among the stored blocks. Reads memory only."""

from __future__ import annotations

from typing import Protocol

from weft.memory.prefix_cache import CacheKey
from weft.memory.tiers.protocol import NOTHING_PRESENT, Present
from weft.tiers.disk.jobs import BlockMemory
from weft.tiers.disk.opening import Opening
from weft.tiers.keys import KeyChain


class StoredKeys(Protocol):
    def __contains__(self, key: bytes, /) -> bool: ...


class Lookup:
    """`stored`: the keys of the blocks that can be found."""

    def __init__(self, opening: Opening, memory: BlockMemory, stored: StoredKeys) -> None:
        self._opening = opening
        self._memory = memory
        self._stored = stored

    def present(self, key: CacheKey) -> Present:
        """The part of a sequence, in blocks, that need not be written."""
        chain = self._opening.chain
        if chain is None:
            return NOTHING_PRESENT
        last = b""
        num_tokens = 0
        for one in chain.keys(key):
            if one not in self._stored:
                return Present(num_tokens, can_resume=False)
            num_tokens += self._memory.block_len
            last = one
        return Present(num_tokens, self._can_resume(chain, last))

    def resumable(self, key: CacheKey, have: int) -> int:
        """Number of tokens at the beginning of a sequence that are stored or among the first
        `have`, and after which it can be resumed."""
        chain = self._opening.chain
        if chain is None:
            return 0
        num_tokens = 0
        resumable = 0
        for one in chain.keys(key):
            if num_tokens + self._memory.block_len > have and one not in self._stored:
                break
            num_tokens += self._memory.block_len
            if self._can_resume(chain, one):
                resumable = num_tokens
        return resumable

    def _can_resume(self, chain: KeyChain, block: bytes) -> bool:
        """Whether a sequence can be resumed after a block."""
        return self._memory.resume_states is None or chain.resume_state(block) in self._stored

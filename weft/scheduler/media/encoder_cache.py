"""The accounts of what the device has encoded, kept from the plans that the scheduler made.

Steps run in the order of their plans, so an item that a plan encodes is available to all later
plans. The number of tokens is bounded: the least recently used items are dropped first, except
those that a prompt in progress needs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import NamedTuple

from weft.plan.inputs import EncoderInput


class EncoderWork(NamedTuple):
    """The part of a plan about the encoder, without the vectors that the step takes."""

    drops_all: bool
    drop: tuple[bytes, ...]  # digests
    encode: tuple[EncoderInput, ...]


class EncoderCache:
    """At most `max_tokens` are kept, or as many as one step takes if that is more. `vector_bytes`:
    memory of the device per token."""

    def __init__(self, max_tokens: int, *, vector_bytes: int = 0) -> None:
        self._max_tokens = max_tokens
        self.vector_bytes = vector_bytes
        self.encoded: OrderedDict[bytes, int] = OrderedDict()  # tokens by digest, last used last
        # Items that the device may have but that are not counted: the next plan drops them.
        self._stale: dict[bytes, None] = {}
        self.is_in_doubt = False  # after a failure: the next plan drops all items
        self.generation = 0  # increases when the device is told to drop an item
        # Items that were encoded ahead and that no step has taken yet.
        self._untaken: set[bytes] = set()
        self.num_tokens = 0  # of encoded items
        self.num_runs = 0  # of the encoder
        self.num_encoded = 0  # tokens
        self.num_reused = 0  # items that were there when a prompt needed them
        self.num_missed = 0  # items that were encoded for a prompt that needed them
        self.busy_s = 0.0  # working time of the encoder, from results

    @property
    def max_ahead(self) -> int:
        """Tokens that may be encoded before steps take them: half of the limit, so that there is
        room for items in use, too."""
        return self._max_tokens // 2

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.encoded

    def take(self, wanted: Sequence[EncoderInput], pinned: Container[bytes]) -> EncoderWork:
        """Plan a step that takes vectors of all of `wanted`, without repetition. Items in `pinned`
        are not dropped for it."""
        encode: list[EncoderInput] = []
        for one in wanted:
            if one.digest in self.encoded:
                self.encoded.move_to_end(one.digest)
            else:
                encode.append(one)
        needed = sum(one.length for one in encode)
        used = {one.digest for one in wanted}
        drops_all = self.is_in_doubt
        drop = list(self._stale)
        self.is_in_doubt = False
        self._stale.clear()
        for digest in self._oldest_for(needed, used, pinned):
            self._let_go(digest)
            drop.append(digest)
        if drop or drops_all:
            self.generation += 1
        for one in encode:
            self.encoded[one.digest] = one.length
        self.num_tokens += needed
        self.num_encoded += needed
        self.num_runs += len(encode)
        return EncoderWork(drops_all, tuple(drop), tuple(encode))

    def use(self, digest: bytes) -> None:
        """Mark the item as recently used, because a waiting prompt needs it."""
        self.encoded.move_to_end(digest)

    def encoded_ahead(self, one: EncoderInput, generation: int, pinned: Container[bytes]) -> None:
        """The device has encoded an item for later steps, as a plan of this generation asked."""
        if generation != self.generation:
            # It may have been dropped since.
            if one.digest not in self.encoded:
                self._stale[one.digest] = None
            return
        if one.digest in self.encoded:
            return
        self._stale.pop(one.digest, None)
        for digest in self._oldest_for(one.length, (one.digest,), pinned):
            self._let_go(digest)
            self._stale[digest] = None
        self.encoded[one.digest] = one.length
        self._untaken.add(one.digest)
        self.num_tokens += one.length
        self.num_encoded += one.length
        self.num_runs += 1

    def first_taken(self, digest: bytes) -> bool:
        """Whether the item was encoded ahead, and is taken for the first time."""
        if digest not in self._untaken:
            return False
        self._untaken.remove(digest)
        return True

    def forget(self, digest: bytes) -> None:
        """Discard the device's vectors of an item: they are invalid."""
        if digest in self.encoded:
            self._let_go(digest)
            self._stale[digest] = None

    def forget_all(self) -> None:
        """Discard all items that the device may have."""
        self.encoded.clear()
        self._stale.clear()
        self._untaken.clear()
        self.is_in_doubt = True
        self.generation += 1
        self.num_tokens = 0

    def _let_go(self, digest: bytes) -> None:
        self.num_tokens -= self.encoded.pop(digest)
        self._untaken.discard(digest)

    def _oldest_for(
        self, needed: int, used: Container[bytes], pinned: Container[bytes]
    ) -> list[bytes]:
        """The items to drop so that there is room for `needed` tokens, as far as possible."""
        missing = self.num_tokens + needed - self._max_tokens
        found: list[bytes] = []
        for digest, length in self.encoded.items():
            if missing <= 0:
                break
            if digest in used or digest in pinned:
                continue
            found.append(digest)
            missing -= length
        return found

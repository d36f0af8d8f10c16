"""What the device has encoded, as the scheduler knows it from the plans that it has made.

Steps run in the order of their plans: what a plan encodes is there for all that follow. Bounded in
tokens; what was used longest ago goes first, and what a prompt needs that is being computed stays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import NamedTuple

from weft.plan.inputs import EncoderInput


class EncoderWork(NamedTuple):
    """What a plan says of it, besides what it takes."""

    drops_all: bool
    drop: tuple[bytes, ...]  # digests
    encode: tuple[EncoderInput, ...]


class EncoderBooks:
    """`max_tokens` are held, or as many as one step takes if these are more. `vector_bytes`: of
    what the device keeps for a token."""

    def __init__(self, max_tokens: int, *, vector_bytes: int = 0) -> None:
        self._max_tokens = max_tokens
        self.vector_bytes = vector_bytes
        self.held: OrderedDict[bytes, int] = OrderedDict()  # tokens by digest, last used last
        # What the device may have and nobody counts on: the next plan drops it,
        self._stale: dict[bytes, None] = {}
        self.is_in_doubt = False  # or, after a failure, all that it has
        self.generation = 0  # rises when the device is told to forget something
        # Those that were encoded before a step took them, and that none has taken yet.
        self._untaken: set[bytes] = set()
        self.num_tokens = 0  # that are held
        self.num_runs = 0  # of the encoder
        self.num_encoded = 0  # tokens
        self.num_reused = 0  # items that were there when a prompt needed them
        self.num_missed = 0  # items that were encoded for a prompt that needed them
        self.busy_s = 0.0  # that the encoder has worked, as results say

    @property
    def max_ahead(self) -> int:
        """Tokens that may be encoded before steps take them: half of what is held, so that what is
        taken has room, too."""
        return self._max_tokens // 2

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.held

    def take(self, wanted: Sequence[EncoderInput], pinned: Container[bytes]) -> EncoderWork:
        """The next step takes vectors of all of `wanted`, each of which stands there once. What is
        `pinned` is not dropped for it."""
        encode: list[EncoderInput] = []
        for one in wanted:
            if one.digest in self.held:
                self.held.move_to_end(one.digest)
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
            self.held[one.digest] = one.length
        self.num_tokens += needed
        self.num_encoded += needed
        self.num_runs += len(encode)
        return EncoderWork(drops_all, tuple(drop), tuple(encode))

    def use(self, digest: bytes) -> None:
        """A prompt that waits needs it: it is not among those that were used longest ago."""
        self.held.move_to_end(digest)

    def encoded_ahead(self, one: EncoderInput, generation: int, pinned: Container[bytes]) -> None:
        """The device has encoded it for later steps, as a plan of this generation told it."""
        if generation != self.generation:
            # It may have been dropped since.
            if one.digest not in self.held:
                self._stale[one.digest] = None
            return
        if one.digest in self.held:
            return
        self._stale.pop(one.digest, None)
        for digest in self._oldest_for(one.length, (one.digest,), pinned):
            self._let_go(digest)
            self._stale[digest] = None
        self.held[one.digest] = one.length
        self._untaken.add(one.digest)
        self.num_tokens += one.length
        self.num_encoded += one.length
        self.num_runs += 1

    def first_taken(self, digest: bytes) -> bool:
        """Whether it was encoded ahead, and is taken for the first time."""
        if digest not in self._untaken:
            return False
        self._untaken.remove(digest)
        return True

    def forget(self, digest: bytes) -> None:
        """What the device has of it is worth nothing."""
        if digest in self.held:
            self._let_go(digest)
            self._stale[digest] = None

    def forget_all(self) -> None:
        """Nothing that the device may have is worth anything."""
        self.held.clear()
        self._stale.clear()
        self._untaken.clear()
        self.is_in_doubt = True
        self.generation += 1
        self.num_tokens = 0

    def _let_go(self, digest: bytes) -> None:
        self.num_tokens -= self.held.pop(digest)
        self._untaken.discard(digest)

    def _oldest_for(
        self, needed: int, used: Container[bytes], pinned: Container[bytes]
    ) -> list[bytes]:
        """What goes so that there is room for `needed` tokens, as far as there can be."""
        missing = self.num_tokens + needed - self._max_tokens
        found: list[bytes] = []
        for digest, length in self.held.items():
            if missing <= 0:
                break
            if digest in used or digest in pinned:
                continue
            found.append(digest)
            missing -= length
        return found

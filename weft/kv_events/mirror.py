"""A copy of the prefix cache's content, built from its changes. It makes the events, and those of
the whole tree for subscribers that have missed some.

    changes of the tree ─▶ apply ─▶ events          whole tree ─▶ events

A block is a page of the cache. Its hash is chained over the tokens, so the same prompt has the same
hashes in every engine. Some readers take a hash as a signed number of 64 bits, others as an
unsigned one, so it has 63 bits:

    h0 = H(namespace)        hi = 63 bits of H(h(i-1), tokens of block i)

Nodes of the tree are only names here: the tree belongs to another thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.kv_events.changes import Change, Cut, Emptied, Hung, Shortened
from weft.kv_events.wire import (
    MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    ExtraKeys,
)
from weft.memory.prefix_cache import TOKEN_BYTES, Handle

HASH_BYTES = 8
HASH_MASK = (1 << 63) - 1


class BlockPosition(NamedTuple):
    """The place of a node in the tree."""

    parent: Handle  # None: the top of the namespace
    parent_hash: int | None  # hash of the previous block; None: the node begins a sequence


class CachedBlocks:
    """The copy of a node of the tree, with one hash for each block of its key."""

    __slots__ = ("hashes", "key", "namespace", "position")

    def __init__(
        self, position: BlockPosition, namespace: str, key: bytes, hashes: list[int]
    ) -> None:
        self.position = position
        self.namespace = namespace
        self.key = key
        self.hashes = hashes


class CacheMirror:
    """A copy of the tree. For one thread."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._step = page_size * TOKEN_BYTES
        self._pieces: dict[Handle, CachedBlocks] = {}

    def apply(self, changes: Sequence[Change]) -> list[CacheEvent]:
        """Apply changes to the copy. Returns the events for subscribers."""
        events: list[CacheEvent] = []
        for change in changes:
            match change:
                case Hung():
                    events.append(self._hang(change))
                case Cut():
                    self._cut(change)
                case Shortened():
                    events.append(self._shorten(change))
                case Emptied():
                    self._pieces.clear()
                    events = [AllBlocksCleared()]  # it makes earlier events unnecessary
        return events

    def snapshot(self) -> list[CacheEvent]:
        """Events that bring a reader in any state to the current content."""
        events: list[CacheEvent] = [AllBlocksCleared()]
        reported: set[Handle] = set()
        for node in self._pieces:
            # Parents come before their children. A split adds the parent later than the child.
            path: list[Handle] = []
            while node is not None and node not in reported:
                reported.add(node)
                path.append(node)
                node = self._pieces[node].position.parent
            events += [self._stored(self._pieces[node]) for node in reversed(path)]
        return events

    def _hang(self, change: Hung) -> BlockStored:
        above = None if change.parent is None else self._pieces[change.parent]
        namespace = change.namespace
        parent_hash = None
        if above is not None:
            namespace = above.namespace
            parent_hash = above.hashes[-1]
        position = BlockPosition(change.parent, parent_hash)
        hashes = block_hashes(namespace, parent_hash, change.key, self._step)
        piece = CachedBlocks(position, namespace, change.key, hashes)
        self._pieces[change.leaf] = piece
        return self._stored(piece)

    def _cut(self, change: Cut) -> None:
        lower = self._pieces[change.lower]
        num_blocks = change.num_bytes // self._step
        upper = CachedBlocks(
            lower.position,
            lower.namespace,
            lower.key[: change.num_bytes],
            lower.hashes[:num_blocks],
        )
        self._pieces[change.upper] = upper
        lower.position = BlockPosition(change.upper, upper.hashes[-1])
        lower.key = lower.key[change.num_bytes :]
        lower.hashes = lower.hashes[num_blocks:]

    def _shorten(self, change: Shortened) -> BlockRemoved:
        piece = self._pieces[change.leaf]
        num_blocks = change.num_bytes // self._step
        gone = piece.hashes[num_blocks:]
        if num_blocks:
            piece.key = piece.key[: change.num_bytes]
            piece.hashes = piece.hashes[:num_blocks]
        else:
            del self._pieces[change.leaf]
        # The last block first, so that a reader with a tree always removes leaves.
        return BlockRemoved(block_hashes=gone[::-1], medium=MEDIUM)

    def _stored(self, piece: CachedBlocks) -> BlockStored:
        adapter, salt = _parts_of(piece.namespace)
        # The ids at a picture's positions use all 32 bits; readers expect no negative numbers.
        token_ids = np.frombuffer(piece.key, np.uint32).tolist()
        return BlockStored(
            block_hashes=piece.hashes,
            parent_block_hash=piece.position.parent_hash,
            token_ids=token_ids,
            block_size=self._page_size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=adapter or None,
            extra_keys=_extra_keys(piece, adapter, salt),
            cache_salt=salt or None,
        )


def block_hashes(
    namespace: str,
    parent_hash: int | None,
    key: bytes,
    step: int,
) -> list[int]:
    """The hash of each block of `step` bytes of a key, which follows the block with `parent_hash`;
    None: the key is at the top of the namespace."""
    if parent_hash is None:
        named = namespace.encode("utf-8", "surrogatepass")
        before = hashlib.sha256(named).digest()[:HASH_BYTES]
    else:
        before = parent_hash.to_bytes(HASH_BYTES, "big")
    found: list[int] = []
    for start in range(0, len(key), step):
        digest = hashlib.sha256(before + key[start : start + step]).digest()
        number = int.from_bytes(digest[:HASH_BYTES], "big") & HASH_MASK
        before = number.to_bytes(HASH_BYTES, "big")
        found.append(number)
    return found


def _parts_of(namespace: str) -> tuple[str, str]:
    """Adapter and salt of a namespace (`Request.cache_key`)."""
    if not namespace.startswith("\0"):
        return "", namespace
    adapter, _, salt = namespace[1:].partition("\0")
    return adapter, salt


def _extra_keys(piece: CachedBlocks, adapter: str, salt: str) -> ExtraKeys | None:
    if not adapter and not salt:
        return None
    each = [adapter] if adapter else None
    keys: ExtraKeys = [each] * len(piece.hashes)
    if piece.position.parent_hash is None and salt:
        keys[0] = [*(each or []), salt]
    return keys

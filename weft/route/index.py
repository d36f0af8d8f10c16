"""An estimate of the prefix caches of engines, from the prompts that each engine got last.

A prompt is divided into blocks; the name of a block is a hash of the block and of all blocks before
it. For each engine the names of its last blocks are kept, as many as fit its KV memory. So no
engine must be asked; an engine may evict a block a little earlier or later, which is a small error.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

BLOCK_LEN = 32  # tokens
_BLOCK_BYTES = 4 * BLOCK_LEN
_DIGEST_BYTES = 8


def block_names(
    tokens: bytes,
    namespace: str = "",
) -> list[bytes]:
    """The names of the complete blocks of a prompt, in order.

    `tokens`: int32, packed. Prompts of different namespaces have no names in common.
    """
    name = blake2b(namespace.encode(), digest_size=_DIGEST_BYTES).digest()
    names: list[bytes] = []
    for start in range(0, len(tokens) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        block = tokens[start : start + _BLOCK_BYTES]
        name = blake2b(
            block,
            key=name,
            digest_size=_DIGEST_BYTES,
        ).digest()
        names.append(name)
    return names


class SentPrefixes:
    """The blocks that one engine got last, at most as many as fit its KV memory."""

    def __init__(self, num_tokens: int) -> None:
        """`num_tokens`: the size of the engine's KV memory."""
        self._most = max(num_tokens // BLOCK_LEN, 1)
        self._blocks: OrderedDict[bytes, None] = OrderedDict()  # the most recently used is last

    def __len__(self) -> int:
        return len(self._blocks)

    def hit_len(self, names: Sequence[bytes]) -> int:
        """Number of tokens at the beginning of a prompt that the engine has probably cached."""
        found = 0
        for name in names:
            if name not in self._blocks:
                break
            found += 1
        return found * BLOCK_LEN

    def add(self, names: Sequence[bytes]) -> None:
        """Add a prompt that the engine gets. Its last blocks are dropped before its first ones, as
        in the engine's prefix cache."""
        blocks = self._blocks
        for name in reversed(names):
            blocks[name] = None
            blocks.move_to_end(name)
        while len(blocks) > self._most:
            blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()

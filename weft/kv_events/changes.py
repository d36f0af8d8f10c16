"""A log of the changes of the prefix cache, which another thread reads later.

Nodes of the tree are only names in the log: the reader does not access them, because they may have
changed again.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from weft.memory.prefix_cache import Handle


class Hung(NamedTuple):
    """A new leaf was added below its parent."""

    leaf: Handle
    parent: Handle  # None: the top of the namespace
    namespace: str  # "" below a parent: the leaf has the namespace of the parent
    key: bytes  # packed tokens


class Cut(NamedTuple):
    """A node was split: `upper` took the first `num_bytes` of the key of `lower`, and is its
    parent now."""

    upper: Handle
    lower: Handle
    num_bytes: int


class Shortened(NamedTuple):
    """A leaf was trimmed to the first `num_bytes` of its key; 0: it was removed."""

    leaf: Handle
    num_bytes: int


class Emptied(NamedTuple):
    """The cache was emptied."""


Change: TypeAlias = Hung | Cut | Shortened | Emptied


class ChangeNotes:
    """A `CacheListener` of a radix tree."""

    def __init__(self) -> None:
        self._changes: list[Change] = []

    def take(self) -> list[Change]:
        """The changes since the last call, in order."""
        taken = self._changes
        self._changes = []
        return taken

    def inserted(self, leaf: Handle) -> None:
        above = leaf.parent
        if above.parent is None:
            self._changes.append(Hung(leaf, None, above.namespace, leaf.key))
        else:
            self._changes.append(Hung(leaf, above, "", leaf.key))

    def split(self, upper: Handle, lower: Handle) -> None:
        self._changes.append(Cut(upper, lower, len(upper.key)))

    def trimmed(self, leaf: Handle) -> None:
        self._changes.append(Shortened(leaf, len(leaf.key)))

    def removed(self, leaf: Handle) -> None:
        self._changes.append(Shortened(leaf, 0))

    def emptied(self) -> None:
        self._changes = [Emptied()]

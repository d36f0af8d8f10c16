"""What has changed in the prefix cache, noted so that another thread can read it later.

A node of the tree is a name here: nobody looks into it afterwards, when it has changed again.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from weft.memory.prefix_cache import Handle


class Hung(NamedTuple):
    """A new leaf hangs below its parent."""

    leaf: Handle
    parent: Handle  # None: the top of the namespace
    namespace: str  # nothing below a parent, whose namespace it has
    key: bytes  # packed tokens


class Cut(NamedTuple):
    """`upper` has the first `num_bytes` of the key of `lower`, and stands above it."""

    upper: Handle
    lower: Handle
    num_bytes: int


class Shortened(NamedTuple):
    """A leaf, or nothing of it, is left: the first `num_bytes` of its key."""

    leaf: Handle
    num_bytes: int


class Emptied(NamedTuple):
    """There is nothing any more."""


Change: TypeAlias = Hung | Cut | Shortened | Emptied


class ChangeNotes:
    """A `CacheListener` of a radix tree."""

    def __init__(self) -> None:
        self._changes: list[Change] = []

    def take(self) -> list[Change]:
        """All since the last call, in order."""
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

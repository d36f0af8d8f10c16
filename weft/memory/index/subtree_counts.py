"""The number of indexed sequences below each node of the prefix tree, and a walk that visits the
heaviest nodes first.

The children of a node are in buckets of equal weight: changing one weight takes two dict
operations, and the walk sorts only the few different weights (n sequences give at most sqrt(2n)),
not the children. This module knows nodes and numbers, but not what the sequences are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from weft.memory.radix.tree import Node, RootNode

# A position in the tree: a node, or the name of a namespace for its top. Root nodes are not used as
# keys, because the tree drops a root with its last child, and makes a new one when the namespace
# returns.
Anchor: TypeAlias = Node | str


def anchor_of(node: Node) -> Anchor:
    if isinstance(node, RootNode):
        return node.namespace
    return node


def above(anchor: Anchor) -> Anchor | None:
    """The parent of an anchor; None for a namespace."""
    if isinstance(anchor, str):
        return None
    assert anchor.parent is not None
    return anchor_of(anchor.parent)


class SubtreeCounts:
    """The weight of an anchor is the number of sequences whose cached prefix ends at or below
    it."""

    def __init__(self) -> None:
        self._weight: dict[Anchor, int] = {}
        # By weight, the children of an anchor; namespaces are the children of None.
        self._children: dict[Anchor | None, dict[int, dict[Anchor, None]]] = {}

    def change(self, anchor: Anchor, by: int) -> None:
        """Add `by` to the weight of `anchor`, and of all anchors above it."""
        heavier: Anchor | None = anchor
        while heavier is not None:
            parent = above(heavier)
            self.put(heavier, parent, self.of(heavier) + by)
            heavier = parent

    def put(self, anchor: Anchor, parent: Anchor | None, weight: int) -> None:
        """Set the weight of one anchor. The anchors above it must already include it."""
        before = self._weight.pop(anchor, 0)
        if before:
            self._drop(parent, anchor, before)
        if weight:
            self._weight[anchor] = weight
            self._children.setdefault(parent, {}).setdefault(weight, {})[anchor] = None

    def split(self, upper: Node, lower: Node, num_at_upper: int) -> None:
        """The new `upper` is the parent of `lower`, and `num_at_upper` sequences end at it now."""
        weight = self._weight.pop(lower, 0)
        if weight:
            parent = above(upper)
            self._drop(parent, lower, weight)
            self.put(upper, parent, weight)
            self.put(lower, upper, weight - num_at_upper)

    def clear(self) -> None:
        self._weight.clear()
        self._children.clear()

    def of(self, anchor: Anchor) -> int:
        return self._weight.get(anchor, 0)

    def heaviest_first(self) -> Iterator[Anchor]:
        """Every anchor with a weight: children before their parent, heavier ones first.

        The order of equal ones is arbitrary but fixed.
        """
        path: list[tuple[Anchor | None, Iterator[Anchor]]] = [(None, self._below(None))]
        while path:
            anchor, rest = path[-1]
            child = next(rest, None)
            if child is not None:
                path.append((child, self._below(child)))
                continue
            path.pop()
            if anchor is not None:
                yield anchor

    def _below(self, anchor: Anchor | None) -> Iterator[Anchor]:
        buckets = self._children.get(anchor, {})
        for weight in sorted(buckets, reverse=True):
            yield from list(buckets.get(weight, ()))

    def _drop(self, parent: Anchor | None, anchor: Anchor, weight: int) -> None:
        buckets = self._children[parent]
        bucket = buckets[weight]
        del bucket[anchor]
        if bucket:
            return
        del buckets[weight]
        if not buckets:
            del self._children[parent]

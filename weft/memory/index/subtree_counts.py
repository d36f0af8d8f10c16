"""How many indexed sequences pass through each node of the prefix tree, and a walk that visits
the heaviest first.

The children of a node stand in buckets of equal weight: a change of one weight is two dict
operations, and the walk sorts the few different weights (n sequences give at most sqrt(2n)),
never the children. It knows nodes and numbers, never what the sequences are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from weft.memory.radix import Node, RootNode

# A place in the tree: a node, or for the top of a namespace its name. The root there is no key:
# the tree drops it with its last child, and makes another when the namespace comes back.
Anchor: TypeAlias = Node | str


def anchor_of(node: Node) -> Anchor:
    if isinstance(node, RootNode):
        return node.namespace
    return node


def above(anchor: Anchor) -> Anchor | None:
    """The anchor that a subtree hangs from; None above a namespace."""
    if isinstance(anchor, str):
        return None
    assert anchor.parent is not None
    return anchor_of(anchor.parent)


class SubtreeCounts:
    """The weight of an anchor: sequences whose cached prefix ends at it or below it."""

    def __init__(self) -> None:
        self._weight: dict[Anchor, int] = {}
        # By weight, the children of an anchor; the namespaces are below None.
        self._children: dict[Anchor | None, dict[int, dict[Anchor, None]]] = {}

    def change(self, anchor: Anchor, by: int) -> None:
        """`by` more sequences end at `anchor`: it and all above it get so much heavier."""
        heavier: Anchor | None = anchor
        while heavier is not None:
            parent = above(heavier)
            self.put(heavier, parent, self.of(heavier) + by)
            heavier = parent

    def put(self, anchor: Anchor, parent: Anchor | None, weight: int) -> None:
        """Set the weight of one anchor; those above it have counted its sequences already."""
        before = self._weight.pop(anchor, 0)
        if before:
            self._drop(parent, anchor, before)
        if weight:
            self._weight[anchor] = weight
            self._children.setdefault(parent, {}).setdefault(weight, {})[anchor] = None

    def split(self, upper: Node, lower: Node, num_at_upper: int) -> None:
        """The new `upper` was put above `lower`, and `num_at_upper` sequences end at it now."""
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

        Equal ones come in any fixed order.
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

"""How many watched sequences pass through each node of the prefix tree, and a walk that visits the heaviest first.

The children of a node stand in buckets of equal weight: changing one weight is two dict operations, and the walk sorts
the few different weights (n sequences give at most sqrt(2n)), never the children.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.memory.radix import Node


class SubtreeCounts:
    def __init__(self) -> None:
        self._weight: dict[Node, int] = {}
        self._children: dict[
            Node | None, dict[int, dict[Node, None]]
        ] = {}  # by weight; the roots are below None

    def change(self, node: Node, by: int) -> None:
        """`by` more sequences end at `node`: it and all above it get so much heavier."""
        at: Node | None = node
        while at is not None:
            self.put(at, self._weight.get(at, 0) + by)
            at = at.parent

    def put(self, node: Node, weight: int) -> None:
        """Set the weight of one node; what is above it has counted its sequences already."""
        before = self._weight.pop(node, 0)
        if before:
            self._drop(node.parent, node, before)
        if weight:
            self._weight[node] = weight
            self._children.setdefault(node.parent, {}).setdefault(weight, {})[node] = None

    def split(self, upper: Node, lower: Node, num_at_upper: int) -> None:
        """`upper` has been put above `lower`, and `num_at_upper` sequences that ended at `lower` end at it now."""
        weight = self._weight.pop(lower, 0)
        if weight:
            self._drop(upper.parent, lower, weight)
            self.put(upper, weight)
            self.put(lower, weight - num_at_upper)

    def clear(self) -> None:
        self._weight.clear()
        self._children.clear()

    def of(self, node: Node) -> int:
        return self._weight.get(node, 0)

    def heaviest_first(self) -> Iterator[Node]:
        """Every node with a weight: children before their parent, heavier ones first, equal ones in any fixed order."""
        path: list[tuple[Node | None, Iterator[Node]]] = [(None, self._below(None))]
        while path:
            node, rest = path[-1]
            child = next(rest, None)
            if child is not None:
                path.append((child, self._below(child)))
                continue
            path.pop()
            if node is not None:
                yield node

    def _below(self, node: Node | None) -> Iterator[Node]:
        buckets = self._children.get(node, {})
        for weight in sorted(buckets, reverse=True):
            yield from list(buckets.get(weight, ()))

    def _drop(self, parent: Node | None, node: Node, weight: int) -> None:
        buckets = self._children[parent]
        bucket = buckets[weight]
        del bucket[node]
        if not bucket:
            del buckets[weight]
            if not buckets:
                del self._children[parent]

"""A walk over the whole prefix tree in small pieces. It finds the heaviest nodes, each with all
that is below it.

A walk over a hundred thousand nodes would take too long between two steps, so it is done in pieces,
and the tree may change in between. Nodes that are cut or removed in the meantime may be counted
with their old size. The walk changes nothing, and knows neither requests nor the meaning of tokens.

    frames   | top: a, b, c | a: d, e | e: ... |     a child is looked at; with the last child of
                                                     a node its sum goes to the one above
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from weft.memory.prefix_cache import TOKEN_BYTES
from weft.memory.radix.tree import Node

MAX_NODES = 50_000  # nodes that one walk visits
MAX_FOUND = 200
HEAD_LEN = 32  # first tokens of a node that are returned, to identify it
TOP = -1  # parent of the first nodes


class SurveyedNode(NamedTuple):
    """A node when the walk visited it."""

    node: Node  # the node, which may have been cut or removed since
    parent: int  # index in `Survey.found`; -1: none
    num_tokens: int  # tokens of the node alone
    num_below: int  # tokens of the node and all below it
    used: int  # time of its last use, in calls of the tree
    locks: int
    pins: int
    head: bytes  # its first tokens


class Survey(NamedTuple):
    """The result of a walk."""

    found: tuple[SurveyedNode, ...]  # parents first
    num_nodes: int  # number of visited nodes
    is_complete: bool  # whether all nodes were visited


class _Frame:
    """A node whose children are being visited."""

    __slots__ = ("children", "next", "node", "num_below", "number", "parent")

    def __init__(
        self,
        node: Node | None,
        children: list[Node],
        number: int,
        parent: int,
        num_below: int,
    ) -> None:
        self.node = node  # None above the roots
        self.children = children
        self.next = 0
        self.number = number  # number of the node in this walk; TOP above the roots
        self.parent = parent
        self.num_below = num_below  # tokens of the node and of the visited nodes below it


class TreeSurvey:
    """One walk. Call `look` until it returns a survey."""

    def __init__(self, tops: Iterable[Node]) -> None:
        self._frames = [
            _Frame(
                None,
                list(islice(tops, MAX_NODES)),
                TOP,
                TOP,
                0,
            )
        ]
        self._num_nodes = 0
        # Heap of the heaviest nodes so far: tokens, and the negative number, so that among equal
        # ones the first is the heavier one and no child is chosen without its parent.
        self._heaviest: list[tuple[int, int, int, Node]] = []
        self._least = 0  # tokens that a leaf needs to be among them

    def look(self, num_nodes: int) -> Survey | None:
        """Visit up to `num_nodes` nodes more. Returns the survey when the walk has ended."""
        end = min(self._num_nodes + num_nodes, MAX_NODES)
        while True:
            frame = self._frames[-1]
            if frame.next < len(frame.children):
                if self._num_nodes == MAX_NODES:
                    return self._cut_short()
                if self._num_nodes >= end:
                    return None
                self._look_below(frame, end - self._num_nodes)
            elif frame.number == TOP:
                return self._survey(is_complete=True)
            else:
                self._leave()

    def _look_below(self, frame: _Frame, num_nodes: int) -> None:
        """Visit the next children of a node, up to the first one that has children of its own.

        Most nodes of a large tree are light leaves side by side; nothing is stored for them.
        """
        number = self._num_nodes
        least = self._least
        num_bytes = 0
        begin = frame.next
        children = frame.children[begin : begin + num_nodes]
        for node in children:
            if node.children:
                break
            size = len(node.key)
            num_bytes += size
            if size >= least * TOKEN_BYTES:
                self._weigh(size // TOKEN_BYTES, number, frame.number, node)
                least = self._least
            number += 1
        num_leaves = number - self._num_nodes
        frame.num_below += num_bytes // TOKEN_BYTES
        frame.next = begin + num_leaves
        self._num_nodes = number
        if num_leaves < len(children):
            self._enter(frame, children[num_leaves])

    def _enter(self, frame: _Frame, node: Node) -> None:
        """Visit the children of the next child first."""
        frame.next += 1
        below = list(islice(node.children.values(), MAX_NODES))
        num_tokens = len(node.key) // TOKEN_BYTES
        self._frames.append(_Frame(node, below, self._num_nodes, frame.number, num_tokens))
        self._num_nodes += 1

    def _leave(self) -> None:
        """All nodes below a node have been visited."""
        frame = self._frames.pop()
        assert frame.node is not None
        self._frames[-1].num_below += frame.num_below
        self._weigh(frame.num_below, frame.number, frame.parent, frame.node)

    def _weigh(
        self,
        num_below: int,
        number: int,
        parent: int,
        node: Node,
    ) -> None:
        heaviest = self._heaviest
        one = (num_below, -number, parent, node)
        if len(heaviest) < MAX_FOUND:
            heapq.heappush(heaviest, one)
        else:
            heapq.heappushpop(heaviest, one)
        if len(heaviest) == MAX_FOUND:
            # A later leaf must be heavier: among equal ones the first counts.
            self._least = heaviest[0][0] + 1

    def _cut_short(self) -> Survey:
        """End the walk at the limit of nodes."""
        while len(self._frames) > 1:
            self._leave()
        return self._survey(is_complete=False)

    def _survey(self, *, is_complete: bool) -> Survey:
        by_number = sorted(self._heaviest, key=_number)
        indices = {-minus: index for index, (_, minus, _, _) in enumerate(by_number)}
        found = []
        for num_below, _, parent, node in by_number:
            one = SurveyedNode(
                node=node,
                parent=indices.get(parent, TOP),
                num_tokens=len(node.key) // TOKEN_BYTES,
                num_below=num_below,
                used=node.used,
                locks=node.locks,
                pins=node.pins,
                head=node.key[: HEAD_LEN * TOKEN_BYTES],
            )
            found.append(one)
        return Survey(
            tuple(found),
            self._num_nodes,
            is_complete,
        )


def _number(one: tuple[int, int, int, Node]) -> int:
    return -one[1]

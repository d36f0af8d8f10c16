"""A look at the whole prefix tree in small pieces: the heaviest nodes, with what is below them.

A walk over a hundred thousand nodes takes too long between two steps, so it is made in pieces, and
the tree may change meanwhile. Nodes that are cut or removed on the way may be counted as they were.
It changes nothing, and knows neither requests nor what the tokens mean.

    frames   | top: a, b, c | a: d, e | e: ... |     a child is looked at; with the last child of
                                                     a node its sum goes to the one above
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from weft.memory.prefix_cache import TOKEN_BYTES
from weft.memory.radix import Node

MAX_NODES = 50_000  # that one walk looks at
MAX_FOUND = 200
HEAD_LEN = 32  # tokens of a node that are kept, to tell what it is
TOP = -1  # parent of the first nodes


class SurveyedNode(NamedTuple):
    """A node as it was when the walk came by."""

    parent: int  # index among those found; -1: none
    num_tokens: int  # of its own
    num_below: int  # and with all below it
    used: int  # when it was last used, in calls of the tree
    locks: int
    pins: int
    head: bytes  # its first tokens


class Survey(NamedTuple):
    """What a walk has found."""

    found: tuple[SurveyedNode, ...]  # parents first
    num_nodes: int  # that it has seen
    is_whole: bool  # it has seen all


class _Frame:
    """A node whose children are being looked at."""

    __slots__ = ("children", "next", "num_below", "number")

    def __init__(
        self,
        children: list[Node],
        number: int,
        num_below: int,
    ) -> None:
        self.children = children
        self.next = 0
        self.number = number  # of the node in this walk; TOP above all
        self.num_below = num_below  # tokens of the node and of what has been seen below it


class TreeSurvey:
    """One walk. `look` until it returns a survey."""

    def __init__(self, tops: Iterable[Node]) -> None:
        self._frames = [
            _Frame(
                list(islice(tops, MAX_NODES)),
                TOP,
                0,
            )
        ]
        self._nodes: list[Node] = []
        self._parents: list[int] = []
        # Heap of the heaviest so far: tokens, and the number, so that of equal ones the first
        # counts as the heavier: no child is chosen without its parent.
        self._heaviest: list[tuple[int, int]] = []

    def look(self, num_nodes: int) -> Survey | None:
        """Look at so many nodes more. Returns what was found, when the walk is over."""
        nodes = self._nodes
        frame = self._frames[-1]
        for _ in range(num_nodes):
            while frame.next == len(frame.children):
                if frame.number == TOP:
                    return self._survey(is_whole=True)
                frame = self._leave()
            if len(nodes) == MAX_NODES:
                return self._cut_short()
            node = frame.children[frame.next]
            frame.next += 1
            number = len(nodes)
            nodes.append(node)
            self._parents.append(frame.number)
            num_tokens = len(node.key) // TOKEN_BYTES
            if node.children:
                children = list(
                    islice(
                        node.children.values(),
                        MAX_NODES,
                    )
                )
                frame = _Frame(children, number, num_tokens)
                self._frames.append(frame)
            else:
                frame.num_below += num_tokens
                self._weigh(num_tokens, number)
        return None

    def _leave(self) -> _Frame:
        """All below a node has been seen. Returns the frame above it."""
        frame = self._frames.pop()
        above = self._frames[-1]
        above.num_below += frame.num_below
        self._weigh(frame.num_below, frame.number)
        return above

    def _weigh(
        self,
        num_below: int,
        number: int,
    ) -> None:
        heaviest = self._heaviest
        if len(heaviest) < MAX_FOUND:
            heapq.heappush(heaviest, (num_below, -number))
        elif num_below >= heaviest[0][0]:
            heapq.heappushpop(heaviest, (num_below, -number))

    def _cut_short(self) -> Survey:
        """The walk has seen as many as it may."""
        while len(self._frames) > 1:
            self._leave()
        return self._survey(is_whole=False)

    def _survey(self, *, is_whole: bool) -> Survey:
        weights = {-number: num_below for num_below, number in self._heaviest}
        numbers = sorted(weights)
        places = {number: place for place, number in enumerate(numbers)}
        found = []
        for number in numbers:
            node = self._nodes[number]
            one = SurveyedNode(
                parent=places.get(
                    self._parents[number],
                    TOP,
                ),
                num_tokens=len(node.key) // TOKEN_BYTES,
                num_below=weights[number],
                used=node.used,
                locks=node.locks,
                pins=node.pins,
                head=node.key[: HEAD_LEN * TOKEN_BYTES],
            )
            found.append(one)
        return Survey(
            tuple(found),
            len(self._nodes),
            is_whole,
        )

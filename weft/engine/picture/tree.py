"""Walks over the prefix tree for pictures, some nodes at a time."""

from __future__ import annotations

from collections.abc import Mapping

from weft.engine.core import EngineCore
from weft.engine.picture.columns import ints, longs
from weft.memory.index.survey import Survey, TreeSurvey
from weft.memory.radix.tree import Node, key_of
from weft.messages.picture import TreeColumns

PIECE_S = 0.02  # least time between two pieces of a walk
NODES_PER_S = 800  # visited nodes per second, so that the share of time is the same for all models
MAX_NODES_AT_ONCE = 256
ROUND_S = 1.0  # least time between two walks


class TreeWatch:
    """Walks over the prefix tree between steps. Nodes are scattered in memory, so visiting one
    takes a microsecond or two."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._walk: TreeSurvey | None = None
        self._begun_s = -ROUND_S
        self._looked_s = -ROUND_S
        self.columns = TreeColumns()  # of the last complete walk
        # Numbers of the nodes in that walk. A node keeps its number while each walk finds it.
        self._numbers: dict[Node, int] = {}
        self._num_named = 0

    def go_on(self, now: float) -> None:
        passed_s = now - self._looked_s
        if passed_s < PIECE_S:
            return
        if self._walk is None:
            # Until a node has been found, walks follow each other at once.
            if now - self._begun_s < ROUND_S and self.columns.num_nodes:
                return
            self._begun_s = now
            self._walk = TreeSurvey(self._core.scheduler.kv.cache.tree.roots.values())
        self._looked_s = now
        survey = self._walk.look(min(int(passed_s * NODES_PER_S), MAX_NODES_AT_ONCE))
        if survey is not None:
            self._walk = None
            self._name(survey)
            self.columns = _tree_columns(
                survey,
                self.columns.round + 1,
                self._numbers,
            )

    def node(self, number: int) -> Node | None:
        """The node with this number, if it is still cached."""
        cache = self._core.scheduler.kv.cache
        for node, its_number in self._numbers.items():
            if its_number == number:
                key = key_of(node)
                location = cache.tree.locate(key, len(key.tokens))
                return node if location.handle is node else None
        return None

    def _name(self, survey: Survey) -> None:
        numbers: dict[Node, int] = {}
        for one in survey.found:
            number = self._numbers.get(one.node)
            if number is None:
                number = self._num_named
                self._num_named += 1
            numbers[one.node] = number
        self._numbers = numbers


def _tree_columns(
    survey: Survey,
    round: int,
    numbers: Mapping[Node, int],
) -> TreeColumns:
    found = survey.found
    last_use = max((one.used for one in found), default=0)
    parents: list[int] = []
    num_tokens: list[int] = []
    num_below: list[int] = []
    ages: list[int] = []
    locks: list[int] = []
    pins: list[int] = []
    heads: list[bytes] = []
    for one in found:
        parents.append(one.parent)
        num_tokens.append(one.num_tokens)
        num_below.append(one.num_below)
        ages.append(last_use - one.used)
        locks.append(one.locks)
        pins.append(one.pins)
        heads.append(one.head)
    return TreeColumns(
        round=round,
        num_nodes=survey.num_nodes,
        is_whole=survey.is_complete,
        parents=ints(parents),
        numbers=ints([numbers[one.node] for one in found]),
        num_tokens=ints(num_tokens),
        num_below=longs(num_below),
        ages=longs(ages),
        locks=ints(locks),
        pins=ints(pins),
        heads=heads,
    )

"""Plans the values of a graph to compute: with `Ops` if they have a meaning, else with torch.
Unused values are left out."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from weft.models.transformers_backend.translate.evaluate import as_rows, is_layout, row_size
from weft.models.transformers_backend.translate.graph import (
    CONSTANT,
    INPUT,
    MATRIX,
    TracedValue,
)
from weft.models.transformers_backend.translate.meaning import (
    Attend,
    AttendTo,
    Gate,
    Group,
    Meaning,
    RmsNormed,
)
from weft.models.transformers_backend.translate.recognise import Recogniser


class Work(NamedTuple):
    """The steps of a computation, in order."""

    steps: list[TracedValue]
    meanings: dict[TracedValue, Meaning]  # of some steps; torch computes the others
    uses: Counter[TracedValue]  # number of steps that read each value
    last_use: dict[TracedValue, int]  # index of the last step that may read its memory
    inputs: tuple[TracedValue, ...]
    output: TracedValue
    constants: list[TracedValue]  # constants that torch reads

    @property
    def groups(self) -> list[Group]:
        found = []
        for node in self.steps:
            meaning = self.meanings.get(node)
            if isinstance(meaning, Attend | Gate):
                found.append(meaning.group)
        return found


def planned(recogniser: Recogniser) -> Work:
    """The work of a graph."""
    meanings = dict(recogniser.meanings)
    for node, meaning in recogniser.meanings.items():
        # Only attention supports a norm of each head by itself.
        if isinstance(meaning, RmsNormed) and row_size(node) != meaning.size:
            del meanings[node]
    while True:
        steps = _needed(recogniser, meanings)
        torn = _torn(steps, meanings)
        if not torn:
            return _work(recogniser, steps, meanings)
        for node in torn:
            meaning = meanings.pop(node)
            if isinstance(meaning, Attend):
                query, key, value, sinks = node.args
                meanings[node] = AttendTo((query, key, value), sinks, meaning.call)


def demanded(node: TracedValue, meanings: dict[TracedValue, Meaning]) -> list[TracedValue]:
    """The values that a step reads."""
    meaning = meanings.get(node)
    if meaning is None:
        return list(dict.fromkeys(node.inputs))
    if isinstance(meaning, AttendTo):
        return list(dict.fromkeys(meaning.inputs))
    return list(dict.fromkeys(as_rows(each) for each in meaning.inputs))


def _needed(recogniser: Recogniser, meanings: dict[TracedValue, Meaning]) -> list[TracedValue]:
    graph = recogniser.graph
    needed = {as_rows(graph.output)}
    pending = list(needed)
    while pending:
        for each in demanded(pending.pop(), meanings):
            if each not in needed:
                needed.add(each)
                pending.append(each)
    return [node for node in graph.nodes if node in needed]


def _torn(steps: list[TracedValue], meanings: dict[TracedValue, Meaning]) -> list[TracedValue]:
    """Uses of several matrices as one, if another step uses one of them separately."""
    alone = {node.name for node in steps if node.op == MATRIX}
    found = []
    for node in steps:
        meaning = meanings.get(node)
        if isinstance(meaning, Attend | Gate) and alone & set(meaning.group.runs):
            found.append(node)
    return found


def _work(
    recogniser: Recogniser, needed: list[TracedValue], meanings: dict[TracedValue, Meaning]
) -> Work:
    graph = recogniser.graph
    output = as_rows(graph.output)
    constants = [node for node in needed if node.op == CONSTANT]
    steps = [node for node in needed if node.op not in (CONSTANT, INPUT)]
    kept = {node: meanings[node] for node in steps if node in meanings}
    uses: Counter[TracedValue] = Counter()
    last_use: dict[TracedValue, int] = {output: len(steps)}
    for index in range(len(steps) - 1, -1, -1):
        node = steps[index]
        # A result of torch may alias the memory of its input.
        may_alias = node not in kept and (is_layout(node) or node.is_written)
        until = max(index, last_use.get(node, index)) if may_alias else index
        for each in demanded(node, kept):
            uses[each] += 1
            last_use[each] = max(last_use.get(each, 0), until)
    return Work(steps, kept, uses, last_use, graph.inputs, output, constants)

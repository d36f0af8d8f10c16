"""A class has one idea: at most 15 attributes and 25 methods, except those listed here.

Values (messages, frozen dataclasses, named tuples) may have any number of fields. The list only
shrinks: a listed class may not grow, and one that keeps the limits must leave it.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.shape.measure import MAX_ATTRIBUTES, MAX_METHODS, sizes


class Exempt(NamedTuple):
    """A class over the limits: its largest size, and why it is that large."""

    attributes: int
    methods: int
    reason: str


NOT_YET = "has several parts that have not been divided yet"

EXCEPTIONS = {
    "Columns": Exempt(18, 10, "a table: an attribute is a column, and rows move in all of them"),
    "CompletionReply": Exempt(17, 7, NOT_YET),
    "Counters": Exempt(20, 1, "a table: an attribute is a number that is only added to"),
    "CppOps": Exempt(11, 40, "a method is an operation of the protocol Ops"),
    "CpuFusedSteps": Exempt(20, 12, NOT_YET),
    "EngineClient": Exempt(12, 29, NOT_YET),
    "Fleet": Exempt(13, 29, NOT_YET),
    "GuardedProtocol": Exempt(11, 27, NOT_YET),
    "KvGroup": Exempt(0, 29, "the protocol of a group of layers: its methods are moments of a row"),
    "KvMemory": Exempt(15, 52, NOT_YET),
    "LLM": Exempt(14, 28, NOT_YET),
    "Ops": Exempt(0, 27, "the protocol of a device: a method is an operation of models"),
    "PrefillScheduler": Exempt(17, 22, NOT_YET),
    "RadixCache": Exempt(12, 35, NOT_YET),
    "Record": Exempt(23, 3, "a table: an attribute is a fact about a simulated request"),
    "Replay": Exempt(16, 14, NOT_YET),
    "RequestTrace": Exempt(21, 6, "a table: an attribute is a moment or a number of a request"),
    "Scheduler": Exempt(15, 38, NOT_YET),
    "Services": Exempt(22, 7, "puts an engine together: an attribute is one of its parts"),
    "WaitingQueue": Exempt(9, 36, NOT_YET),
    "WeightStore": Exempt(11, 30, NOT_YET),
    "WindowedLayers": Exempt(7, 34, "it has what the protocol KvGroup asks for"),
}


def test_classes_are_small_except_those_listed() -> None:
    large = {
        name: size
        for name, size in sizes().items()
        if size.attributes > MAX_ATTRIBUTES or size.methods > MAX_METHODS
    }
    assert large.keys() == EXCEPTIONS.keys(), (
        "a large class is not listed, or a listed one is small"
    )
    for name, size in large.items():
        exempt = EXCEPTIONS[name]
        assert size.attributes <= exempt.attributes, name
        assert size.methods <= exempt.methods, name

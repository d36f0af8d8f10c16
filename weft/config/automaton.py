"""Regular expressions as automata with a bounded cost per character, for any pattern and any text.

Python's own parser reads the pattern; its tree becomes a nondeterministic automaton (Thompson,
1968) without back-tracking. Constructs that need back-tracking (back-references, look-around,
possessive repeats) are refused. Counted repeats are expanded; a limit on the expanded size also
bounds the work per character. Knows no texts: stop patterns (`text/stop/regex.py`) and patterns of
an adapter's modules (`executor/lora/patterns.py`) run the automaton, each in its own way.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable

# The parser of the standard library, and the operators of its trees.
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

_MAX_SEEN = 4_096  # characters whose result a node caches

_REFUSED = {
    **dict.fromkeys((ops.ASSERT, ops.ASSERT_NOT), "look-around"),
    **dict.fromkeys((ops.GROUPREF, ops.GROUPREF_EXISTS), "a reference to a group"),
    **dict.fromkeys((ops.POSSESSIVE_REPEAT, ops.ATOMIC_GROUP), "what forbids back-tracking"),
}

CharTest = Callable[[str], bool]


class BadPattern(ValueError):
    """The pattern is not valid, or uses a refused construct. The message is for the user."""


class PatternNode:
    """A node of a pattern: a character to match (`accepts`), a condition (`holds`), or the end."""

    __slots__ = ("_seen", "_test", "follow", "holds", "pattern")

    def __init__(
        self,
        test: CharTest | None = None,
        holds: Callable[[str, str], bool] | None = None,
        pattern: str = "",
    ) -> None:
        self.follow: tuple[PatternNode, ...] = ()  # the nodes that may come next
        # A condition on the characters around this position; "" at the begin or end of the text.
        self.holds = holds
        self.pattern = pattern  # the pattern that ends here; "" if none does
        self._test = test
        self._seen: dict[str, bool] = {}

    def accepts(self, char: str) -> bool:
        known = self._seen.get(char)
        if known is not None:
            return known
        known = self._test is not None and self._test(char)
        if len(self._seen) < _MAX_SEEN:
            self._seen[char] = known
        return known


class Automaton:
    """The automaton of several patterns. A match may begin at any node of `first`.

    `max_edges`: transitions of all patterns together, and so the most look-ups per character.
    `ends_anywhere`: `$` holds after every character, because the text is stopped there; otherwise
    only where the text ends.
    """

    def __init__(
        self, patterns: Iterable[str], *, max_edges: int, ends_anywhere: bool = False
    ) -> None:
        """Raises BadPattern."""
        self._room = max_edges
        self._max_edges = max_edges
        self._ends_anywhere = ends_anywhere
        self._nodes: list[PatternNode] = []
        first: dict[PatternNode, None] = {}
        for pattern in patterns:
            tree = _parsed(pattern)
            end = PatternNode(pattern=pattern)
            try:
                begin = self._sequence(tree.data, (end,), tree.state.flags)
            except RecursionError as exc:
                raise BadPattern("the pattern is nested too deeply") from exc
            first |= dict.fromkeys(begin)
        self.first = tuple(first)

    def empty_match(self) -> str | None:
        """A pattern that may match the empty text; None if no pattern does."""
        left = list(self.first)
        seen = set(left)
        while left:
            node = left.pop()
            if node.pattern:
                return node.pattern
            if node.holds is not None:
                new = set(node.follow) - seen
                left += new
                seen |= new
        return None

    # Each method builds the part before the nodes `follow`, from its end to its beginning, and
    # returns the first nodes of that part.

    def _sequence(
        self,
        items: Any,
        follow: tuple[PatternNode, ...],
        flags: int,
    ) -> tuple[PatternNode, ...]:
        for op, argument in reversed(list(items)):
            follow = self._one(op, argument, follow, flags)
        return follow

    def _one(
        self,
        op: Any,
        argument: Any,
        follow: tuple[PatternNode, ...],
        flags: int,
    ) -> tuple[PatternNode, ...]:
        match op:
            case ops.LITERAL | ops.NOT_LITERAL | ops.ANY | ops.IN:
                node = PatternNode(test=_char_test(op, argument, flags))
                return (self._connected(node, follow),)
            case ops.BRANCH:
                return _union(self._sequence(one, follow, flags) for one in argument[1])
            case ops.SUBPATTERN:
                _, added, removed, items = argument
                return self._sequence(items, follow, (flags | added) & ~removed)
            case ops.MAX_REPEAT | ops.MIN_REPEAT:
                low, high, items = argument
                return self._repeat(low, high, items, follow, flags)
            case ops.AT:
                node = PatternNode(holds=self._condition(argument, flags))
                return (self._connected(node, follow),)
        what = _REFUSED.get(op, str(op).lower())
        raise BadPattern(f"{what} cannot be used here")

    def _repeat(
        self,
        low: int,
        high: Any,
        items: Any,
        follow: tuple[PatternNode, ...],
        flags: int,
    ) -> tuple[PatternNode, ...]:
        begin = follow
        if high is ops.MAXREPEAT:
            begin = _union((self._loop(items, follow, flags), follow))
        else:
            # Each optional repetition may be the last: x{,3} is (x(xx?)?)?
            for _ in range(high - low):
                self._count(1)
                begin = _union((self._sequence(items, begin, flags), follow))
        for _ in range(low):
            self._count(1)
            begin = self._sequence(items, begin, flags)
        return begin

    def _loop(
        self,
        items: Any,
        follow: tuple[PatternNode, ...],
        flags: int,
    ) -> tuple[PatternNode, ...]:
        """One or more repetitions: the end of a repetition also leads to the next one."""
        joint = PatternNode()  # a placeholder for the nodes after a repetition, until they exist
        inside = len(self._nodes)
        begin = self._sequence(items, (joint,), flags)
        again = tuple(node for node in begin if node is not joint)
        after = _union((again, follow))
        for node in self._nodes[inside:]:
            if joint in node.follow:
                node.follow = _replaced(node.follow, joint, after)
                self._count(len(after))
        return _replaced(begin, joint, after)

    def _connected(self, node: PatternNode, follow: tuple[PatternNode, ...]) -> PatternNode:
        self._count(len(follow))
        node.follow = follow
        self._nodes.append(node)
        return node

    def _count(self, edges: int) -> None:
        self._room -= edges
        if self._room < 0:
            raise BadPattern(
                "the patterns are too large: "
                f"written out, they have more than {self._max_edges:,} transitions"
            )

    def _condition(self, at: Any, flags: int) -> Callable[[str, str], bool]:
        lines = bool(flags & re.MULTILINE)
        match at:
            case ops.AT_BEGINNING if lines:
                return lambda before, after: before in ("", "\n")
            case ops.AT_BEGINNING | ops.AT_BEGINNING_STRING:
                return lambda before, after: not before
            case ops.AT_BOUNDARY:
                return lambda before, after: _is_word(before, flags) != _is_word(after, flags)
            case ops.AT_NON_BOUNDARY:
                return lambda before, after: _is_word(before, flags) == _is_word(after, flags)
        # $ and \Z. SGLang also matches them after any character: it searches the text so far.
        if self._ends_anywhere:
            return lambda before, after: True
        if at is ops.AT_END and lines:
            return lambda before, after: after in ("", "\n")
        return lambda before, after: not after


def _parsed(pattern: str) -> Any:
    try:
        with warnings.catch_warnings():  # about syntax that a future Python may read differently
            warnings.simplefilter("ignore")
            return _parser.parse(pattern)
    except RecursionError as exc:
        raise BadPattern("the pattern is nested too deeply") from exc
    except (re.error, OverflowError, ValueError) as exc:
        raise BadPattern(f"{pattern[:64]!r} is not a regular expression: {exc}") from exc


def _union(parts: Iterable[tuple[PatternNode, ...]]) -> tuple[PatternNode, ...]:
    return tuple(dict.fromkeys(node for part in parts for node in part))


def _replaced(
    nodes: tuple[PatternNode, ...],
    joint: PatternNode,
    after: tuple[PatternNode, ...],
) -> tuple[PatternNode, ...]:
    return _union(after if node is joint else (node,) for node in nodes)


def _is_word(char: str, flags: int) -> bool:
    if flags & re.ASCII and not char.isascii():
        return False
    return char.isalnum() or char == "_"


def _char_test(op: Any, argument: Any, flags: int) -> CharTest:
    if op is ops.ANY:
        if flags & re.DOTALL:
            return lambda char: True
        return lambda char: char != "\n"
    items = [(ops.LITERAL, argument)]
    if op is ops.IN:
        items = list(argument)
    negated = op is ops.NOT_LITERAL or items[0][0] is ops.NEGATE
    tests: list[CharTest] = []
    for kind, value in items:
        if kind is not ops.NEGATE:
            tests.append(_item_test(kind, value, flags))

    def is_in(char: str) -> bool:
        return any(test(char) for test in tests)

    def is_in_any_case(char: str) -> bool:
        lower = char.lower()
        upper = char.upper()
        return any(map(is_in, {char, lower, upper, lower.upper(), upper.lower()}))

    test = is_in
    if flags & re.IGNORECASE:
        test = is_in_any_case
    if negated:
        return _opposite(test)
    return test


def _item_test(op: Any, argument: Any, flags: int) -> CharTest:
    if op is ops.LITERAL:
        return chr(argument).__eq__
    if op is ops.RANGE:
        low, high = map(chr, argument)
        # A change of case may result in several characters.
        return lambda char: len(char) == 1 and low <= char <= high
    tests: dict[Any, CharTest] = {
        ops.CATEGORY_DIGIT: str.isdecimal,
        ops.CATEGORY_SPACE: str.isspace,
        ops.CATEGORY_WORD: lambda char: char.isalnum() or char == "_",
    }
    opposites = {
        ops.CATEGORY_NOT_DIGIT: ops.CATEGORY_DIGIT,
        ops.CATEGORY_NOT_SPACE: ops.CATEGORY_SPACE,
        ops.CATEGORY_NOT_WORD: ops.CATEGORY_WORD,
    }
    test = tests[opposites.get(argument, argument)]
    if flags & re.ASCII:
        test = _in_ascii(test)
    if argument in opposites:
        return _opposite(test)
    return test


def _opposite(test: CharTest) -> CharTest:
    return lambda char: not test(char)


def _in_ascii(test: CharTest) -> CharTest:
    return lambda char: char.isascii() and test(char)

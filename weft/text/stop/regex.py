"""Stop patterns in a text that arrives in pieces: the end of the first match, and the text that can
be returned.

The match is the one that ends first; of several that end there, the one that begins first. So it
depends neither on how the text is divided into pieces nor on the greediness of a pattern. All nodes
that a match may have reached are followed in parallel, each with its earliest beginning.

    returned | held back: from the earliest beginning on, at most WINDOW | not received yet
              ^ start                                                     ^ position

If a match is longer than `WINDOW` characters, its beginning has already been returned.
"""

from __future__ import annotations

from functools import lru_cache

from weft.config.automaton import Automaton, BadPattern, PatternNode

WINDOW = 1_024  # characters
# Transitions of all patterns of one request together, and so the most look-ups per character.
MAX_EDGES = 500


@lru_cache(maxsize=64)
def compile_patterns(patterns: tuple[str, ...]) -> Automaton:
    """The automaton of stop patterns. `$` holds after every character, because a text that is
    stopped there ends there. Raises BadPattern."""
    automaton = Automaton(patterns, max_edges=MAX_EDGES, ends_anywhere=True)
    empty = automaton.empty_match()
    if empty is not None:
        raise BadPattern(
            f"{empty[:64]!r} matches the empty text; a pattern must match at least one character"
        )
    return automaton


class RegexMatcher:
    """Finds the first match in one completion's text. `StringMatcher` does so for stop strings."""

    __slots__ = (
        "_automaton",
        "_before",
        "_begins",
        "_include",
        "_live",
        "_pending",
        "_position",
        "matched",
    )

    def __init__(self, automaton: Automaton, *, include: bool) -> None:
        self._automaton = automaton
        self._include = include  # also return the match itself
        # The nodes that open matches have reached, each with the earliest beginning of a match.
        self._live: dict[PatternNode, int] = {}
        self._begins: dict[str, bool] = {}  # by character: whether a match may begin with it
        self._position = 0  # number of characters so far
        self._before = ""  # the last character
        self._pending = ""  # the held-back text
        self.matched: str | None = None  # the pattern that matched

    def push(self, text: str) -> str:
        """Add `text`. Returns the text that is final; once `matched` is set, no more follows."""
        start = self._position - len(self._pending)
        combined = self._pending + text
        for char in text:
            end = self._step(char)
            if end is not None:
                return self._cut(combined, start, *end)
        earliest = min(self._live.values(), default=self._position)
        border = max(earliest, self._position - WINDOW)
        self._pending = combined[border - start :]
        return combined[: border - start]

    def pass_over(self, text: str) -> str:
        """Add text before the first match that is allowed."""
        return text

    def flush(self) -> str:
        """The text has ended: returns the held-back text, up to a match that needed the end."""
        rest = self._pending
        self._pending = ""
        end = None
        if self._live:
            end = self._pass_conditions("")
        self._live = {}
        if end is None:
            return rest
        return self._cut(rest, self._position - len(rest), *end)

    def _step(self, char: str) -> tuple[PatternNode, int, int] | None:
        """Add a character. Returns a match: its last node, its begin and end positions."""
        # The usual case: no match is open and this character cannot begin one.
        if not self._live and not self._may_begin(char):
            self._position += 1
            self._before = char
            return None
        for node in self._automaton.first:
            self._live.setdefault(node, self._position)
        end = self._pass_conditions(char)
        if end is not None:
            return end
        live: dict[PatternNode, int] = {}
        for node, begin in self._live.items():
            if node.accepts(char):
                for following in node.follow:
                    if begin < live.get(following, begin + 1):
                        live[following] = begin
        self._live = live
        self._position += 1
        self._before = char
        return self._ended()

    def _may_begin(self, char: str) -> bool:
        known = self._begins.get(char)
        if known is not None:
            return known
        first = self._automaton.first
        known = any(node.holds is not None or node.accepts(char) for node in first)
        if len(self._begins) < WINDOW:
            self._begins[char] = known
        return known

    def _pass_conditions(self, next_char: str) -> tuple[PatternNode, int, int] | None:
        """Pass the conditions that hold between the last character and `next_char`, the next one.

        Returns a match that ends there, or None.
        """
        live = self._live
        left = [node for node in live if node.holds is not None]
        while left:
            node = left.pop()
            assert node.holds is not None
            if not node.holds(self._before, next_char):
                continue
            begin = live[node]
            for following in node.follow:
                if begin < live.get(following, begin + 1):
                    live[following] = begin
                    if following.holds is not None:
                        left.append(following)
        return self._ended()

    def _ended(self) -> tuple[PatternNode, int, int] | None:
        earliest: tuple[PatternNode, int, int] | None = None
        for node, begin in self._live.items():
            if node.pattern and (earliest is None or begin < earliest[1]):
                earliest = (node, begin, self._position)
        return earliest

    def _cut(self, combined: str, start: int, node: PatternNode, begin: int, end: int) -> str:
        """Record the match. Returns the text up to its beginning, or with `include` up to its end.

        `combined` is the text from position `start` on.
        """
        self.matched = node.pattern
        self._pending = ""
        self._live = {}
        border = end
        if not self._include:
            border = max(begin, end - WINDOW)
        return combined[: border - start]

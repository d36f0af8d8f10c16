"""Stop patterns in a text that arrives in pieces: where the first match ends, what can be shown.

The match is the one that ends first, and of those that end there the one that begins first: so it
depends neither on how the text was cut into pieces nor on how greedy a pattern is. All places of
the automaton that a match may have come to are followed at once, each with the earliest beginning.

    shown | held back: from the earliest beginning on, at most WINDOW | not come yet
           ^ start                                                     ^ position

Of a match that is longer than `WINDOW` characters the beginning has been shown.
"""

from __future__ import annotations

from weft.text.stop.pattern import Automaton, PatternNode

WINDOW = 1_024  # characters


class RegexMatcher:
    """Finds the first match in one completion's text. `StringMatcher` is the same for strings."""

    __slots__ = (
        "_automaton",
        "_before",
        "_begins",
        "_held",
        "_include",
        "_live",
        "_position",
        "matched",
    )

    def __init__(self, automaton: Automaton, *, include: bool) -> None:
        self._automaton = automaton
        self._include = include  # show the match itself
        # The places that matches have come to, and the earliest position at which one began.
        self._live: dict[PatternNode, int] = {}
        self._begins: dict[str, bool] = {}  # of characters: whether a match may begin with them
        self._position = 0  # characters so far
        self._before = ""  # the last of them
        self._held = ""
        self.matched: str | None = None  # the pattern

    def push(self, text: str) -> str:
        """What can be shown after `text` has come. Once `matched` is set, that was the last."""
        start = self._position - len(self._held)
        whole = self._held + text
        for char in text:
            end = self._step(char)
            if end is not None:
                return self._cut(whole, start, *end)
        earliest = min(self._live.values(), default=self._position)
        border = max(earliest, self._position - WINDOW)
        self._held = whole[border - start :]
        return whole[: border - start]

    def flush(self) -> str:
        """What was held back, when the text has ended. That it ends may be what a match needed."""
        held = self._held
        self._held = ""
        end = None
        if self._live:
            end = self._pass_conditions("")
        self._live = {}
        if end is None:
            return held
        return self._cut(held, self._position - len(held), *end)

    def _step(self, char: str) -> tuple[PatternNode, int, int] | None:
        """Take a character. Returns a match: its last node, where it began, where it ended."""
        # Most characters can begin no match, and no match is open: one look-up is enough.
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

    def _pass_conditions(self, behind: str) -> tuple[PatternNode, int, int] | None:
        """Go through the conditions that hold between the last character and `behind`.

        Returns a match that ends there.
        """
        live = self._live
        left = [node for node in live if node.holds is not None]
        while left:
            node = left.pop()
            assert node.holds is not None
            if not node.holds(self._before, behind):
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

    def _cut(self, whole: str, start: int, node: PatternNode, begin: int, end: int) -> str:
        """The text up to a match, or up to its end; `whole` begins at `start`."""
        self.matched = node.pattern
        self._held = ""
        self._live = {}
        border = end
        if not self._include:
            border = max(begin, end - WINDOW)
        return whole[: border - start]

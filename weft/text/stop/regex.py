"""Stop patterns in a text that arrives in pieces: where the first match ends, and how much can be shown before.

The match is the one that ends first, and of those that end there the one that begins first: so it depends neither on
how the text was cut into pieces nor on how greedy a pattern is. All places of the automaton that a match may have come
to are followed at once, each with the earliest beginning. From the earliest of these on the text is held back, but at
most `WINDOW` characters: of a longer match the beginning has been shown.
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
        self._live: dict[
            PatternNode, int
        ] = {}  # where matches have come to: the earliest position at which one began
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
        border = max(min(self._live.values(), default=self._position), self._position - WINDOW)
        self._held = whole[border - start :]
        return whole[: border - start]

    def flush(self) -> str:
        """What was held back, when the text has ended. That it ends may be what a match needed."""
        held, self._held = self._held, ""
        end = self._enter("") if self._live else None
        self._live = {}
        return held if end is None else self._cut(held, self._position - len(held), *end)

    def _step(self, char: str) -> tuple[PatternNode, int, int] | None:
        """Go on by a character. Returns a match: its last node, where it began, where it ended."""
        if not self._live and not self._may_begin(char):
            self._position += 1
            self._before = char
            return None
        for node in self._automaton.first:
            self._live.setdefault(node, self._position)
        end = self._enter(char)
        if end is None:
            live: dict[PatternNode, int] = {}
            for node, begin in self._live.items():
                if node.accepts(char):
                    for following in node.follow:
                        if begin < live.get(following, begin + 1):
                            live[following] = begin
            self._live = live
            self._position += 1
            self._before = char
            end = self._ended()
        return end

    def _may_begin(self, char: str) -> bool:
        known = self._begins.get(char)
        if known is None:
            known = any(
                node.holds is not None or node.accepts(char) for node in self._automaton.first
            )
            if len(self._begins) < WINDOW:
                self._begins[char] = known
        return known

    def _enter(self, behind: str) -> tuple[PatternNode, int, int] | None:
        """Pass the conditions that hold between the last character and `behind`. Returns a match that ends there."""
        live = self._live
        left = [node for node in live if node.holds is not None]
        while left:
            node = left.pop()
            assert node.holds is not None
            if node.holds(self._before, behind):
                for following in node.follow:
                    if live[node] < live.get(following, live[node] + 1):
                        live[following] = live[node]
                        if following.holds is not None:
                            left.append(following)
        return self._ended()

    def _ended(self) -> tuple[PatternNode, int, int] | None:
        ends = [(begin, node) for node, begin in self._live.items() if node.pattern]
        if not ends:
            return None
        begin, node = min(ends, key=lambda end: end[0])
        return node, begin, self._position

    def _cut(self, whole: str, start: int, node: PatternNode, begin: int, end: int) -> str:
        """The text up to a match, or up to its end; `whole` begins at `start`."""
        self.matched = node.pattern
        self._held, self._live = "", {}
        return whole[: (end if self._include else max(begin, end - WINDOW)) - start]

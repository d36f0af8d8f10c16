"""Stop strings in a text that arrives in pieces: the end of the first one, and the text that can be
returned.

The match is the stop string that ends first; of several that end there, the longest. So it does not
depend on how the text is divided into pieces. All strings are searched in parallel (Aho and
Corasick, 1975): a character costs the same for one stop string as for sixty. The depth of the
current node is the number of characters that may begin a stop string: exactly these are held back.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache

_CACHED_LEN = 1_024  # characters of all strings; automata of longer sets are not cached


class StopStrings:
    """The automaton of a set of stop strings: immutable, shared by all completions that use it.

    A node is a prefix of some stop string; node 0 is the empty one.
    """

    __slots__ = ("depth", "fail", "first", "next", "word")

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.next: list[dict[str, int]] = [{}]  # by character
        self.fail = [0]  # the longest proper suffix of the node that is a node too
        self.depth = [0]
        self.word = [""]  # the longest stop string that ends here
        for string in strings:
            self._add(string)
        self._link()
        self.first = frozenset(self.next[0])

    def _add(self, string: str) -> None:
        node = 0
        for char in string:
            child = self.next[node].get(char)
            if child is None:
                child = len(self.next)
                self.next[node][char] = child
                self.next.append({})
                self.fail.append(0)
                self.depth.append(self.depth[node] + 1)
                self.word.append("")
            node = child
        self.word[node] = string

    def _link(self) -> None:
        # Breadth first: the suffix of a node is shorter, so its links are already complete.
        queue = deque(self.next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self.next[node].items():
                self.fail[child] = self.step(self.fail[node], char)
                if not self.word[child]:
                    self.word[child] = self.word[self.fail[child]]
                queue.append(child)

    def step(self, node: int, char: str) -> int:
        """The longest suffix of `node + char` that is a node."""
        while True:
            child = self.next[node].get(char)
            if child is not None:
                return child
            if node == 0:
                return 0
            node = self.fail[node]


_cached = lru_cache(maxsize=64)(StopStrings)


def compile_stops(strings: tuple[str, ...]) -> StopStrings:
    """The automaton for `strings`, none of them empty. Small automata are cached."""
    if sum(map(len, strings)) > _CACHED_LEN:
        return StopStrings(strings)
    return _cached(strings)


class StringMatcher:
    """Finds the first stop string in one completion's text."""

    __slots__ = ("_include", "_node", "_pending", "_stops", "matched")

    def __init__(self, stops: StopStrings, *, include: bool) -> None:
        self._stops = stops
        self._include = include  # also return the stop string itself
        self._node = 0
        self._pending = ""  # the text of the node: the possible beginning of a stop string
        self.matched: str | None = None  # the stop string

    def push(self, text: str) -> str:
        """Add `text`. Returns the text that is final; once `matched` is set, no more follows."""
        stops = self._stops
        node = self._node
        # Most texts have no first character of a stop string.
        if node == 0 and stops.first.isdisjoint(text):
            return text
        for position, char in enumerate(text):
            node = stops.step(node, char)
            word = stops.word[node]
            if word:
                self.matched = word
                shown = self._pending + text[: position + 1]
                if not self._include:
                    shown = shown[: len(shown) - len(word)]
                return shown
        combined = self._pending + text
        border = len(combined) - stops.depth[node]
        self._node = node
        self._pending = combined[border:]
        return combined[:border]

    def pass_over(self, text: str) -> str:
        """Add text before the first match that is allowed."""
        return text

    def flush(self) -> str:
        """The text has ended without a match: returns the held-back text."""
        rest = self._pending
        self._pending = ""
        self._node = 0
        return rest

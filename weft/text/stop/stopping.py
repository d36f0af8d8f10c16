"""One matcher for stop strings and stop patterns, which end a completion by its text.

Knows no tokens: the engine handles stop tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from weft.config.automaton import Automaton, BadPattern
from weft.messages.sampling import InvalidParam, SamplingParams
from weft.text.stop.regex import RegexMatcher, compile_patterns
from weft.text.stop.strings import StopStrings, StringMatcher, compile_stops


class StopMatcher(Protocol):
    """Finds the first stop string or pattern in one completion's text."""

    matched: str | None  # the stop string or pattern; None until a match

    def push(self, text: str) -> str:
        """Add `text`. Returns the text that is final; once `matched` is set, no more follows."""
        ...

    def pass_over(self, text: str) -> str:
        """Add text before the first match that is allowed. Returns the text that is final."""
        ...

    def flush(self) -> str:
        """The text has ended: returns the held-back text.

        A pattern that needs the end of the text may match only now.
        """
        ...


class CombinedMatcher:
    """Strings first: patterns get only the text that cannot be the beginning of a stop string."""

    __slots__ = ("_patterns", "_strings", "matched")

    def __init__(self, strings: StringMatcher, patterns: RegexMatcher) -> None:
        self._strings = strings
        self._patterns = patterns
        self.matched: str | None = None

    def push(self, text: str) -> str:
        passed = self._strings.push(text)
        return self._match_patterns(passed, is_last=self._strings.matched is not None)

    def pass_over(self, text: str) -> str:
        return text

    def flush(self) -> str:
        return self._match_patterns(self._strings.flush(), is_last=True)

    def _match_patterns(self, text: str, *, is_last: bool) -> str:
        shown = self._patterns.push(text)
        # A pattern may match only because the text ends here.
        if is_last and self._patterns.matched is None:
            shown += self._patterns.flush()
        self.matched = self._patterns.matched or self._strings.matched
        return shown


class Stops:
    """One compiled set of strings and patterns: immutable, shared by all its completions."""

    __slots__ = ("_include", "_patterns", "_strings")

    def __init__(self, params: SamplingParams) -> None:
        """Raises InvalidParam."""
        self._include = params.include_stop
        self._strings: StopStrings | None = None
        self._patterns: Automaton | None = None
        if params.stop:
            self._strings = compile_stops(params.stop)
        if params.stop_regex:
            try:
                self._patterns = compile_patterns(params.stop_regex)
            except BadPattern as exc:
                raise InvalidParam("stop_regex", f"stop_regex: {exc}") from exc

    def matcher(self) -> StopMatcher | None:
        """A new matcher for one completion; None if the set is empty."""
        strings: StringMatcher | None = None
        patterns: RegexMatcher | None = None
        if self._strings is not None:
            strings = StringMatcher(self._strings, include=self._include)
        if self._patterns is not None:
            patterns = RegexMatcher(self._patterns, include=self._include)
        if strings is not None and patterns is not None:
            return CombinedMatcher(strings, patterns)
        return strings or patterns


class StopSets:
    """The distinct `Stops` of many completions, each compiled once."""

    def __init__(self, every: Iterable[SamplingParams]) -> None:
        """Raises InvalidParam."""
        self._compiled: dict[tuple[object, ...], Stops] = {}
        for params in every:
            key = _key(params)
            if key not in self._compiled:
                self._compiled[key] = Stops(params)

    def matcher(self, params: SamplingParams) -> StopMatcher | None:
        return self._compiled[_key(params)].matcher()


def _key(params: SamplingParams) -> tuple[object, ...]:
    return (params.stop, params.stop_regex, params.include_stop)

"""What ends a completion by its text: stop strings and stop patterns, one matcher for both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from weft.messages.sampling import InvalidParam, SamplingParams
from weft.text.stop.pattern import BadPattern, compile_patterns
from weft.text.stop.regex import RegexMatcher
from weft.text.stop.strings import StringMatcher, compile_stops


class StopMatcher(Protocol):
    """Of one completion's text."""

    matched: str | None

    def push(self, text: str) -> str:
        """What can be shown after `text` has come. Once `matched` is set, that was the last."""
        ...

    def flush(self) -> str:
        """What was held back, when the text has ended. Only now may a match be found that needs the end."""
        ...


class CombinedMatcher:
    """Strings first: a pattern sees what can be no beginning of a stop string, and what of one is shown."""

    __slots__ = ("_patterns", "_strings", "matched")

    def __init__(self, strings: StringMatcher, patterns: RegexMatcher) -> None:
        self._strings = strings
        self._patterns = patterns
        self.matched: str | None = None

    def push(self, text: str) -> str:
        return self._through(self._strings.push(text), is_last=self._strings.matched is not None)

    def flush(self) -> str:
        return self._through(self._strings.flush(), is_last=True)

    def _through(self, text: str, *, is_last: bool) -> str:
        shown = self._patterns.push(text)
        if is_last and self._patterns.matched is None:
            shown += self._patterns.flush()
        self.matched = self._patterns.matched or self._strings.matched
        return shown


class Stops:
    """What is compiled of one set of strings and patterns: immutable, shared by all completions that use it."""

    __slots__ = ("_include", "_patterns", "_strings")

    def __init__(self, params: SamplingParams) -> None:
        """Raises InvalidParam."""
        self._include = params.include_stop
        self._strings = compile_stops(params.stop) if params.stop else None
        try:
            self._patterns = compile_patterns(params.stop_regex) if params.stop_regex else None
        except BadPattern as exc:
            raise InvalidParam("stop_regex", f"stop_regex: {exc}") from exc

    def matcher(self) -> StopMatcher | None:
        """A fresh one; None if nothing is looked for."""
        strings = (
            None if self._strings is None else StringMatcher(self._strings, include=self._include)
        )
        patterns = (
            None if self._patterns is None else RegexMatcher(self._patterns, include=self._include)
        )
        return (
            strings or patterns
            if strings is None or patterns is None
            else CombinedMatcher(strings, patterns)
        )


class StopSets:
    """The different `Stops` of many completions, each compiled once."""

    def __init__(self, every: Iterable[SamplingParams]) -> None:
        """Raises InvalidParam."""
        different = {_key(params): params for params in every}
        self._compiled = {key: Stops(params) for key, params in different.items()}

    def matcher(self, params: SamplingParams) -> StopMatcher | None:
        return self._compiled[_key(params)].matcher()


def _key(params: SamplingParams) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    return params.stop, params.stop_regex, params.include_stop

"""A matcher that looks only at the answer of a completion, which begins after its reasoning.

A model that thinks about a question may quote a stop string: that is no end of its answer. Knows no
format of reasoning: a `Parser` finds where it ends.
"""

from __future__ import annotations

from weft.text.parsers.events import AnswerText, Event, ReasoningText
from weft.text.parsers.output import Parser
from weft.text.stop.stopping import StopMatcher


class AnswerMatcher:
    """Passes the reasoning through, and everything from the answer on to another matcher.

    pending: no one knows yet what it is | reasoning: passed | the answer: matched
    """

    __slots__ = ("_answers", "_matcher", "_pending", "_reasoning", "_reasons", "matched")

    def __init__(self, matcher: StopMatcher, reasoning: Parser) -> None:
        self.matched: str | None = None
        self._matcher = matcher
        self._reasoning = reasoning
        self._pending = ""
        self._reasons = False  # the text is in the reasoning, or between it and the answer
        self._answers = False

    def push(self, text: str) -> str:
        if self._answers:
            return self._match(text)
        passed = self._before_answer(text, self._reasoning.push(text))
        if not self._answers:
            return passed
        answer = self._pending
        self._pending = ""
        return passed + self._match(answer)

    def pass_over(self, text: str) -> str:
        if self._answers:
            return self._matcher.pass_over(text)
        passed = self._before_answer(text, self._reasoning.push(text))
        if self._answers:
            passed += self._matcher.pass_over(self._pending)
            self._pending = ""
        return passed

    def flush(self) -> str:
        """The text has ended: what is held back is the answer, unless it is reasoning."""
        passed = ""
        if not self._answers:
            passed = self._before_answer("", self._reasoning.flush())
        if self._answers:
            passed += self._match(self._pending)
        else:
            passed += self._pending
        self._pending = ""
        if self.matched is None:
            passed += self._matcher.flush()
            self.matched = self._matcher.matched
        return passed

    def _match(self, text: str) -> str:
        shown = self._matcher.push(text)
        self.matched = self._matcher.matched
        return shown

    def _before_answer(self, text: str, events: list[Event]) -> str:
        """The text that is reasoning; the beginning of the answer is held back."""
        self._pending += text
        answer = "".join(event.text for event in events if isinstance(event, AnswerText))
        if any(isinstance(event, ReasoningText) for event in events):
            self._reasons = True
        if answer:
            self._answers = True
            # Formats with marks around the answer do not tell it as it was written.
            begin = len(self._pending) - len(answer) if self._pending.endswith(answer) else 0
        elif self._reasons:
            begin = len(self._pending)
        else:
            begin = 0
        passed = self._pending[:begin]
        self._pending = self._pending[begin:]
        return passed

"""One completion's text as reasoning, answer and tool calls, while it is written or at its end."""

from __future__ import annotations

from weft.text.parsers.events import AnswerText, CallArguments, CallBegin, Event, ReasoningText
from weft.text.parsers.parser import Parser


class ParsedOutput:
    """The parsers of one completion, one behind the other: what is not reasoning may be calls.

    With `one_call` every call but the first is dropped; without `keep_reasoning` all reasoning is, and without
    `stream_reasoning` it is told at once, at its end. White space before a call is no answer.
    """

    def __init__(
        self,
        reasoning: Parser | None,
        tools: Parser | None,
        *,
        one_call: bool = False,
        keep_reasoning: bool = True,
        stream_reasoning: bool = True,
    ) -> None:
        self.num_calls = 0
        self.reasoning_text: list[str] = []
        self._reasoning = reasoning
        self._tools = tools
        self._one_call = one_call
        self._keep_reasoning = keep_reasoning
        self._stream_reasoning = stream_reasoning
        self._untold: list[str] = []  # of the reasoning
        self._space = ""  # at the beginning of the answer
        self._answered = False

    @property
    def has_cut_call(self) -> bool:
        """Whether the end has cut off a call that was told."""
        return self._tools is not None and self._tools.has_cut

    def push(self, text: str, *, is_last: bool = False) -> list[Event]:
        """The events that `text` completes; with `is_last` all that are left."""
        found: list[Event] = [AnswerText(text)] if text else []
        if self._reasoning is not None:
            found = _through(self._reasoning, found, is_last)
            self.reasoning_text += [
                event.text for event in found if isinstance(event, ReasoningText)
            ]
        if not self._stream_reasoning:
            found = self._at_once(found, is_last)
        if self._tools is not None:
            found = _through(self._tools, found, is_last)
        kept = [event for event in found if self._keeps(event)]
        return self._without_space(kept, is_last)

    def _at_once(self, events: list[Event], is_last: bool) -> list[Event]:
        self._untold += [event.text for event in events if isinstance(event, ReasoningText)]
        others: list[Event] = [event for event in events if not isinstance(event, ReasoningText)]
        if self._untold and (others or is_last):
            others.insert(0, ReasoningText("".join(self._untold)))
            self._untold.clear()
        return others

    def _keeps(self, event: Event) -> bool:
        if isinstance(event, CallBegin):
            self.num_calls = 1 if self._one_call else event.call + 1
        if isinstance(event, ReasoningText):
            return self._keep_reasoning
        return not (
            self._one_call and isinstance(event, CallBegin | CallArguments) and event.call > 0
        )

    def _without_space(self, events: list[Event], is_last: bool) -> list[Event]:
        result: list[Event] = []
        for event in events:
            if isinstance(event, AnswerText) and not self._answered:
                self._space += event.text
                if self._space.isspace():
                    continue
                event, self._answered = AnswerText(self._space), True
            elif isinstance(event, CallBegin):
                self._answered = True  # what follows is separated by it
            result.append(event)
        if is_last and not self._answered and self._space:
            result.append(AnswerText(self._space))
        return result


def _through(parser: Parser, events: list[Event], is_last: bool) -> list[Event]:
    """Events with all text replaced by what `parser` finds in it."""
    result: list[Event] = []
    for event in events:
        if isinstance(event, AnswerText):
            result += parser.push(event.text)
        else:
            result.append(event)
    if is_last:
        result += parser.flush()
    return result

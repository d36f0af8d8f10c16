"""Separates one completion's text into reasoning, answer and tool calls, while it is generated or
at its end.

    text ──▶ Parser of the reasoning ──▶ Parser of the calls ──▶ events

Knows no single format: a `Parser` runs the reader of any format.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.text.parsers.events import AnswerText, CallArguments, CallBegin, Event, ReasoningText
from weft.text.parsers.stream import Reading, Stream


class Parser:
    """Reads the text of one completion in one format. After the reader ends, all text is plain."""

    def __init__(self, read: Callable[[Stream], Reading[None]], stream: Stream) -> None:
        self._stream = stream
        self._reading: Reading[None] | None = read(stream)

    @property
    def has_cut(self) -> bool:
        """Whether the text ended within the last emitted call."""
        return self._stream.has_cut

    def push(self, text: str) -> list[Event]:
        """The events that `text` completes."""
        self._stream.add(text)
        return self._resume()

    def flush(self) -> list[Event]:
        """The remaining events, at the end of the text."""
        self._stream.end()
        return self._resume()

    def _resume(self) -> list[Event]:
        if self._reading is not None:
            try:
                next(self._reading)
            except StopIteration:
                self._reading = None
        if self._reading is None:
            self._stream.pass_through()
        return self._stream.events()


class ParsedOutput:
    """The parsers of one completion in a row: only text outside of the reasoning can have calls.

    White space before a call is not an answer.
    """

    def __init__(
        self,
        reasoning: Parser | None,
        tools: Parser | None,
        *,
        one_call: bool = False,
        only_calls: bool = False,
        keep_reasoning: bool = True,
        stream_reasoning: bool = True,
    ) -> None:
        """`one_call`: drop all calls but the first. `only_calls`: the grammar allows nothing else;
        text that is left at the end begins a call: drop it. `keep_reasoning`: emit the reasoning,
        else drop it. `stream_reasoning`: emit it in pieces, else in one piece at its end."""
        self.num_calls = 0
        self.reasoning_text: list[str] = []
        self._reasoning = reasoning
        self._tools = tools
        self._one_call = one_call
        self._only_calls = only_calls
        self._keep_reasoning = keep_reasoning
        self._stream_reasoning = stream_reasoning
        self._untold: list[str] = []  # pieces of the reasoning that are held back
        self._space = ""  # white space at the beginning of the answer
        self._answered = False

    @property
    def has_cut_call(self) -> bool:
        """Whether the text ended within the last emitted call."""
        return self._tools is not None and self._tools.has_cut

    def push(self, text: str, *, is_last: bool = False) -> list[Event]:
        """The events that `text` completes; with `is_last`, all remaining events."""
        events: list[Event] = []
        if text:
            events.append(AnswerText(text))
        if self._reasoning is not None:
            events = _parse_text(self._reasoning, events, is_last)
            for event in events:
                if isinstance(event, ReasoningText):
                    self.reasoning_text.append(event.text)
        if not self._stream_reasoning:
            events = self._join_reasoning(events, is_last)
        if self._tools is not None:
            events = _parse_text(self._tools, events, False)
            if is_last:
                events += self._rest(self._tools)
        kept = [event for event in events if self._keeps(event)]
        return self._without_space(kept, is_last)

    def _rest(self, tools: Parser) -> list[Event]:
        rest = tools.flush()
        if self._only_calls:
            return [event for event in rest if not isinstance(event, AnswerText)]
        return rest

    def _join_reasoning(self, events: list[Event], is_last: bool) -> list[Event]:
        """Hold the reasoning back until another event comes; emit it before that event."""
        others: list[Event] = []
        for event in events:
            if isinstance(event, ReasoningText):
                self._untold.append(event.text)
            else:
                others.append(event)
        if self._untold and (others or is_last):
            others.insert(0, ReasoningText("".join(self._untold)))
            self._untold.clear()
        return others

    def _keeps(self, event: Event) -> bool:
        if isinstance(event, CallBegin):
            self.num_calls = 1 if self._one_call else event.call + 1
        if isinstance(event, ReasoningText):
            return self._keep_reasoning
        if self._one_call and isinstance(event, CallBegin | CallArguments):
            return event.call == 0
        return True

    def _without_space(self, events: list[Event], is_last: bool) -> list[Event]:
        result: list[Event] = []
        for event in events:
            if isinstance(event, AnswerText) and not self._answered:
                self._space += event.text
                if self._space.isspace():
                    continue
                self._answered = True
                result.append(AnswerText(self._space))
                continue
            if isinstance(event, CallBegin):
                self._answered = True  # the call separates the following text
            result.append(event)
        if is_last and not self._answered and self._space:
            result.append(AnswerText(self._space))
        return result


def _parse_text(parser: Parser, events: list[Event], is_last: bool) -> list[Event]:
    """`events` with all text replaced by the events that `parser` finds in it."""
    result: list[Event] = []
    for event in events:
        if isinstance(event, AnswerText):
            result += parser.push(event.text)
        else:
            result.append(event)
    if is_last:
        result += parser.flush()
    return result

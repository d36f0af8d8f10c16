"""Harmony, the format of gpt-oss: messages on channels, each of them reasoning, answer or call.

    <|channel|>analysis<|message|>It rains, so ...<|end|><|start|>assistant<|channel|>commentary
    to=functions.weather <|constrain|>json<|message|>{...}<|call|>

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>Yes.

The template ends the prompt with `<|start|>assistant`, so the first header begins behind that. What
makes a call is the recipient, whatever the channel; it stands behind the role or behind the
channel. The reader of reasoning leaves a message with a recipient as it is, and the reader of calls
behind it finds it. A message with a broken header is text.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from weft.text.parsers.calls import json_arguments, whole_call
from weft.text.parsers.events import AnswerText, ReasoningText
from weft.text.parsers.stream import MAX_NAME_LEN, Reading, Stream

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
END = "<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
_ENDS = (END, "<|call|>", "<|return|>")
_BEGINS = (START, CHANNEL)
_RECIPIENT = "to="
# Of a header in which all white space is one space.
_HEADER = re.compile(
    r"(?:<\|start\|> ?(?:assistant)?)?"
    r" ?(?:to=(?P<role_to>[\w.\-]+))?"
    r" ?(?:<\|channel\|> ?(?P<channel>\w+))?"
    r" ?(?:to=(?P<channel_to>[\w.\-]+))?"
    r" ?(?:<\|constrain\|>)? ?(?P<type>\w+)?",
    re.ASCII,
)


class MessageHeader(NamedTuple):
    """What is known of a message before its content."""

    channel: str  # "" if none is named
    recipient: str  # "" if the message is for the user


def messages(stream: Stream, begin: str, end: str, *, inside: bool) -> Reading[None]:
    """All messages: those of the channel `analysis` are reasoning, the others are the answer.

    A message with a recipient is told as it stands, with its marks. `inside`: the prompt has opened
    a message of reasoning.
    """
    told: set[type] = set()
    if inside:
        told.add(ReasoningText)
        mark = yield from _content(stream, ReasoningText)
    elif (yield from _begins_with_recipient(stream)):
        mark = _RECIPIENT
    else:
        mark = yield from _content(stream, AnswerText)
    while mark:
        found = yield from stream.take_until(MESSAGE, START, *_ENDS, limit=MAX_NAME_LEN)
        header = None
        if found is not None:
            header = parsed_header(mark + found.text)
            if found.marker == START:  # the next header, and this one is broken
                stream.give_up(keep=START)
                mark = START
                continue
            if not found.marker:
                if header is not None and not header.recipient:
                    stream.settle()  # cut off before it says anything
                return
            if found.marker != MESSAGE:  # it ends before it has content
                header = None
        if header is None or header.recipient:
            mark = yield from _content(stream, AnswerText, raw=True)
            continue
        stream.settle()
        kind: type[AnswerText] | type[ReasoningText] = AnswerText
        if header.channel == "analysis":
            kind = ReasoningText
        if kind in told:
            stream.tell(kind("\n"))  # messages of a kind are lines of one text
        told.add(kind)
        mark = yield from _content(stream, kind)


def calls(stream: Stream) -> Reading[None]:
    """The messages whose recipient is a tool, out of those that `messages` has left as they are."""
    if (yield from _begins_with_recipient(stream)):
        mark = _RECIPIENT
    else:
        mark = yield from stream.text_until(*_BEGINS)
    while mark:
        found = yield from stream.take_until(MESSAGE, START, *_ENDS, limit=MAX_NAME_LEN)
        if found is not None and found.marker == START:
            stream.give_up(keep=START)
            mark = START
            continue
        if found is not None and found.marker == MESSAGE:
            header = parsed_header(mark + found.text)
            if header is not None and (yield from _call(stream, header.recipient)):
                yield from stream.skip_space()
                yield from stream.accept_one(*_ENDS)
                yield from stream.skip_space()
                stream.settle()
        mark = yield from stream.text_until(*_BEGINS)


def _call(stream: Stream, recipient: str) -> Reading[bool]:
    """The content of a message to `recipient`, as arguments. Empty content is no arguments."""
    name = recipient.removeprefix("functions.")
    if name not in stream.names:
        return False
    yield from stream.skip_space()
    if (yield from stream.accept_one(*_ENDS)):
        return whole_call(stream, name, "{}")
    return (yield from json_arguments(stream, name))


def parsed_header(text: str) -> MessageHeader | None:
    """The header that is written as `text`, from the mark that begins it; None if it is broken."""
    match = _HEADER.fullmatch(" ".join(text.split()))
    if match is None:
        return None
    return MessageHeader(match["channel"] or "", match["role_to"] or match["channel_to"] or "")


def _begins_with_recipient(stream: Stream) -> Reading[bool]:
    """Whether the text begins with the rest of a header whose role is in the prompt: ` to=...`."""
    yield from stream.skip_space()
    return (yield from stream.accept(_RECIPIENT))


def _content(
    stream: Stream,
    kind: type[AnswerText] | type[ReasoningText],
    *,
    raw: bool = False,
) -> Reading[str]:
    """Tell what comes up to the next message; `raw`: with the mark that ends this one.

    Returns the mark that begins the next message, which is consumed; "" at the end of the text.
    """
    marker = yield from stream.text_until(*_ENDS, *_BEGINS, kind=kind)
    while marker in _ENDS:
        if raw:
            stream.give_up()
        yield from stream.skip_space()
        stream.settle()
        marker = yield from stream.text_until(*_ENDS, *_BEGINS)
    return marker

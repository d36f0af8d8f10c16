"""Harmony, the format of gpt-oss: messages on channels, each one reasoning, an answer or a call.

    <|channel|>analysis<|message|>It rains, so ...<|end|><|start|>assistant<|channel|>commentary
    to=functions.weather <|constrain|>json<|message|>{...}<|call|>

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>Yes.

The template ends the prompt with `<|start|>assistant`, so the first header begins after that. A
message is a call if it has a recipient, on any channel; the recipient follows the role or the
channel. The reader of reasoning (`messages`) passes a message with a recipient on unchanged, and
the reader of calls (`calls`) then finds it. A message with a broken header is text.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from weft.text.parsers.calls import complete_call, json_arguments
from weft.text.parsers.events import AnswerText, ReasoningText
from weft.text.parsers.stream import MAX_NAME_LEN, Reading, Stream

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
END = "<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
ENDS = (END, "<|call|>", "<|return|>")
_BEGINS = (START, CHANNEL)
_RECIPIENT = "to="
# A header whose white space has been replaced by single spaces.
_HEADER = re.compile(
    r"(?:<\|start\|> ?(?:assistant)?)?"
    r" ?(?:to=(?P<role_to>[\w.\-]+))?"
    r" ?(?:<\|channel\|> ?(?P<channel>\w+))?"
    r" ?(?:to=(?P<channel_to>[\w.\-]+))?"
    r" ?(?:<\|constrain\|>)? ?(?P<type>\w+)?",
    re.ASCII,
)


class MessageHeader(NamedTuple):
    """The header of a message."""

    channel: str  # "" if the header names none
    recipient: str  # "" if the message is for the user


def messages(stream: Stream, begin: str, end: str, *, inside: bool) -> Reading[None]:
    """Read all messages: those on the channel `analysis` are reasoning, the others are the answer.

    A message with a recipient is emitted unchanged as text, with its marks. `inside`: the text
    begins inside a message of reasoning.
    """
    emitted: set[type] = set()
    if inside:
        emitted.add(ReasoningText)
        mark = yield from _content(stream, ReasoningText)
    elif (yield from _begins_with_recipient(stream)):
        mark = _RECIPIENT
    else:
        mark = yield from _content(stream, AnswerText)
    while mark:
        found = yield from stream.take_until(MESSAGE, START, *ENDS, limit=MAX_NAME_LEN)
        header = None
        if found is not None:
            header = parsed_header(mark + found.text)
            if found.marker == START:  # the next header begins: this one is broken
                stream.give_up(keep=START)
                mark = START
                continue
            if not found.marker:
                if header is not None and not header.recipient:
                    stream.settle()  # the text ends before the message has content
                return
            if found.marker != MESSAGE:  # the message ends before it has content
                header = None
        if header is None or header.recipient:
            mark = yield from _content(stream, AnswerText, raw=True)
            continue
        stream.settle()
        kind: type[AnswerText] | type[ReasoningText] = AnswerText
        if header.channel == "analysis":
            kind = ReasoningText
        if kind in emitted:
            stream.tell(kind("\n"))  # messages of one kind become lines of one text
        emitted.add(kind)
        mark = yield from _content(stream, kind)


def calls(stream: Stream) -> Reading[None]:
    """Read the messages whose recipient is a tool, in the text that `messages` passes on."""
    if (yield from _begins_with_recipient(stream)):
        mark = _RECIPIENT
    else:
        mark = yield from stream.text_until(*_BEGINS)
    while mark:
        found = yield from stream.take_until(MESSAGE, START, *ENDS, limit=MAX_NAME_LEN)
        if found is not None and found.marker == START:
            stream.give_up(keep=START)
            mark = START
            continue
        if found is not None and found.marker == MESSAGE:
            header = parsed_header(mark + found.text)
            if header is not None and (yield from _call(stream, header.recipient)):
                yield from stream.skip_space()
                yield from stream.accept_one(*ENDS)
                yield from stream.skip_space()
                stream.settle()
        mark = yield from stream.text_until(*_BEGINS)


def _call(stream: Stream, recipient: str) -> Reading[bool]:
    """Read the content of a message to `recipient` as arguments. Empty content means {}."""
    name = recipient.removeprefix("functions.")
    if name not in stream.names:
        return False
    yield from stream.skip_space()
    if (yield from stream.accept_one(*ENDS)):
        return complete_call(stream, name, "{}")
    return (yield from json_arguments(stream, name))


def parsed_header(text: str) -> MessageHeader | None:
    """The header in `text`, which begins with its first mark; None if it is broken."""
    match = _HEADER.fullmatch(" ".join(text.split()))
    if match is None:
        return None
    return MessageHeader(match["channel"] or "", match["role_to"] or match["channel_to"] or "")


def _begins_with_recipient(stream: Stream) -> Reading[bool]:
    """Whether the text begins with ` to=...`: the rest of a header that began in the prompt."""
    yield from stream.skip_space()
    return (yield from stream.accept(_RECIPIENT))


def _content(
    stream: Stream,
    kind: type[AnswerText] | type[ReasoningText],
    *,
    raw: bool = False,
) -> Reading[str]:
    """Emit the text up to the next message; `raw`: including the mark at the end of this one.

    Consumes and returns the mark that begins the next message; "" at the end of the text.
    """
    marker = yield from stream.text_until(*ENDS, *_BEGINS, kind=kind)
    while marker in ENDS:
        if raw:
            stream.give_up()
        yield from stream.skip_space()
        stream.settle()
        marker = yield from stream.text_until(*ENDS, *_BEGINS)
    return marker

"""Calls written as XML: Qwen 3 Coder, Seed, GLM 4.5 and MiniMax M2. One generator for each.

Arguments come one by one, without types: `typed_values.py` reads them by the tool's schema. A
string is told while it is written, since files that models write are strings; other values are told
when they are complete. What all readers do with broken calls is in `calls.py`.
"""

from __future__ import annotations

import json
from functools import partial
from typing import NamedTuple

from weft.text.parsers.calls import MAX_CALL_LEN, StreamedCall, section
from weft.text.parsers.stream import MAX_HELD, Reading, Stream
from weft.text.parsers.typed_values import ArgumentTypes

QWEN_FUNCTION = "<function="
SEED_BEGIN = "<seed:tool_call>"
GLM_KEY = "<arg_key>"
MINIMAX_BEGIN = "<minimax:tool_call>"


class XmlMarks(NamedTuple):
    """What stands around the arguments of a call."""

    key: str  # before the key of each
    key_end: str
    value: str  # before its value, behind white space; "" if `key_end` is before it
    value_end: str
    close: str  # behind the last one
    # A value stands on lines of its own: the line breaks around it are none of it.
    on_lines: bool = False


_QWEN = XmlMarks("<parameter=", ">", "", "</parameter>", "</function>", on_lines=True)
_GLM = XmlMarks(GLM_KEY, "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")
_MINIMAX = XmlMarks('<parameter name="', '">', "", "</parameter>", "</invoke>")


def qwen3_coder(stream: Stream) -> Reading[None]:
    """Calls between tags, which Qwen 3 Coder sometimes leaves out.

    <tool_call>
    <function=weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>
    """
    yield from _tagged_functions(stream, "<tool_call>", "</tool_call>")


def seed_oss(stream: Stream) -> Reading[None]:
    """The same between tags of Seed's own."""
    yield from _tagged_functions(stream, SEED_BEGIN, "</seed:tool_call>")


def _tagged_functions(stream: Stream, begin: str, end: str) -> Reading[None]:
    yield from section(
        stream,
        partial(_named_call, name_end=">", marks=_QWEN),
        begins=(begin,),
        call_begin=QWEN_FUNCTION,
        ends=(end,),
    )


def minimax_m2(stream: Stream) -> Reading[None]:
    """
    <minimax:tool_call>
    <invoke name="weather">
    <parameter name="city">Oslo</parameter>
    </invoke>
    </minimax:tool_call>
    """
    yield from section(
        stream,
        partial(_named_call, name_end='">', marks=_MINIMAX),
        begins=(MINIMAX_BEGIN,),
        call_begin='<invoke name="',
        ends=("</minimax:tool_call>",),
    )


def glm45(stream: Stream) -> Reading[None]:
    """A pair of tags for each call, with the name behind the first: GLM 4.5 to 4.7.

    <tool_call>weather
    <arg_key>city</arg_key>
    <arg_value>Oslo</arg_value>
    </tool_call>
    """
    while (yield from stream.text_until("<tool_call>")):
        yield from stream.skip_space()
        name = yield from stream.read_name()
        if (yield from _arguments(stream, name, _GLM)):
            yield from stream.skip_space()
            stream.settle()


def _named_call(stream: Stream, name_end: str, marks: XmlMarks) -> Reading[bool]:
    """A call behind what is before its name. False if it is none, or breaks off."""
    name = yield from stream.read_name()
    if not (yield from stream.accept(name_end)):
        return False
    return (yield from _arguments(stream, name, marks))


def _arguments(stream: Stream, name: str, marks: XmlMarks) -> Reading[bool]:
    """The arguments of a call of `name`, up to its closing tag."""
    if name not in stream.names:
        return False
    call = StreamedCall(stream, name)
    types = ArgumentTypes(stream.schemas.get(name))
    keys: set[str] = set()
    call.add("{")
    while True:
        yield from stream.skip_space()
        if stream.eager:
            stream.settle()
        if (yield from stream.accept(marks.close)):
            break
        key = yield from _key(stream, marks)
        if key is None or key in keys:
            return stream.ended and call.break_off()
        before = ""
        if keys:
            before = ", "
        call.add(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        keys.add(key)
        if not (yield from _value(stream, call, types, key, marks)):
            return stream.ended and call.break_off()
    call.add("}")
    if not call.close():
        return False
    stream.settle()
    return True


def _key(stream: Stream, marks: XmlMarks) -> Reading[str | None]:
    """The key of the next argument, with all that is before the value; None if there is none."""
    if not (yield from stream.accept(marks.key)):
        return None
    key = yield from stream.read_until(marks.key_end)
    if key is None or not marks.value:
        return key
    yield from stream.skip_space()
    if not (yield from stream.accept(marks.value)):
        return None
    return key.strip()


def _value(
    stream: Stream,
    call: StreamedCall,
    types: ArgumentTypes,
    key: str,
    marks: XmlMarks,
) -> Reading[bool]:
    """The value of the argument `key`, and the mark behind it. False if it is too long, or cut."""
    ends: tuple[str, ...] = (marks.value_end,)
    if marks.on_lines:
        ends = ("\n" + marks.value_end, marks.value_end)
        yield from stream.accept("\n")
    if stream.eager and types.is_text(key):
        stream.settle()
        call.add('"')
        if not (yield from stream.text_until(*ends, kind=call.as_arguments)):
            return False
        call.add('"')
        stream.settle()
        return True
    limit = MAX_CALL_LEN
    if stream.eager:
        limit = MAX_HELD
    found = yield from stream.take_until(*ends, limit=limit)
    if found is None or not found.marker:
        return False
    call.add(types.as_json(key, found.text))
    if stream.eager:
        stream.settle()
    return True

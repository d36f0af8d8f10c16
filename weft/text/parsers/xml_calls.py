"""Calls in XML: Qwen 3 Coder, Seed, GLM, MiniMax M2, DeepSeek V3.2, Step 3.

Arguments come one by one, usually without types: `typed_values.py` converts them by the tool's
schema. A string is emitted while it is generated, because files that models write are strings;
other values are emitted when they are complete. `calls.py` handles broken calls for all readers.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from weft.text.parsers.calls import MAX_CALL_LEN, StreamedCall, section
from weft.text.parsers.stream import MAX_PENDING, Reading, Stream
from weft.text.parsers.typed_values import ArgumentTypes, any_json, json_string

QWEN_FUNCTION = "<function="
SEED_BEGIN = "<seed:tool_call>"
GLM_KEY = "<arg_key>"
MINIMAX_BEGIN = "<minimax:tool_call>"
# DeepSeek's and Step's tokens are written with the vertical bar U+FF5C.
DSML = "｜DSML｜"
STEP3_CALLS_BEGIN = "<｜tool_calls_begin｜>"


class XmlMarks(NamedTuple):
    """The marks around the arguments of a call."""

    key: str  # before the key of each argument
    key_end: str
    value: str  # before the value, after white space; "": the value directly follows `key_end`
    value_end: str
    close: str  # after the last argument
    # Values are on separate lines: the line breaks around a value do not belong to it.
    on_lines: bool = False
    # The mark before the flag that follows the key: "true" for a string, "false" for JSON; "":
    # there is no flag.
    is_string: str = ""


class ArgumentKey(NamedTuple):
    """The key of an argument."""

    name: str
    is_string: bool | None  # None: the schema decides


_QWEN = XmlMarks("<parameter=", ">", "", "</parameter>", "</function>", on_lines=True)
_GLM = XmlMarks(GLM_KEY, "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")
_MINIMAX = XmlMarks('<parameter name="', '">', "", "</parameter>", "</invoke>")
_DSML = XmlMarks(
    f'<{DSML}parameter name="',
    '"',
    "",
    f"</{DSML}parameter>",
    f"</{DSML}invoke>",
    is_string=' string="',
)
_STEP3 = XmlMarks(
    '<steptml:parameter name="',
    '">',
    "",
    "</steptml:parameter>",
    "</steptml:invoke>",
)


def qwen3_coder(stream: Stream) -> Reading[None]:
    """Calls between tags, which Qwen 3 Coder sometimes omits.

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
    """The calls of Qwen 3 Coder between Seed's own tags."""
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
    """Calls with named parameters, between tags: MiniMax M2.

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


def deepseek_v32(stream: Stream) -> Reading[None]:
    """Calls with a flag on each argument, whether it is a string: DeepSeek V3.2, and V4 with its
    other tag.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="weather">
    <｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>
    """
    yield from section(
        stream,
        partial(_named_call, name_end='">', marks=_DSML),
        begins=(f"<{DSML}function_calls>", f"<{DSML}tool_calls>"),
        call_begin=f'<{DSML}invoke name="',
        ends=(f"</{DSML}function_calls>", f"</{DSML}tool_calls>"),
    )


def step3(stream: Stream) -> Reading[None]:
    """Calls in XML, each between special tokens: Step 3.

    <｜tool_calls_begin｜>
    <｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">
    <steptml:parameter name="city">Oslo</steptml:parameter>
    </steptml:invoke><｜tool_call_end｜>
    <｜tool_calls_end｜>
    """
    yield from section(
        stream,
        _step3_call,
        begins=(STEP3_CALLS_BEGIN,),
        call_begin="<｜tool_call_begin｜>function<｜tool_sep｜>",
        ends=("<｜tool_calls_end｜>",),
    )


def _step3_call(stream: Stream) -> Reading[bool]:
    yield from stream.skip_space()
    if not (yield from stream.accept('<steptml:invoke name="')):
        return False
    if not (yield from _named_call(stream, '">', _STEP3)):
        return False
    yield from stream.skip_space()
    yield from stream.accept("<｜tool_call_end｜>")
    return True


def glm45(stream: Stream) -> Reading[None]:
    """A pair of tags for each call, with the name after the first tag: GLM 4.5 to 4.7.

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
    """Read a call from its name on. False if it is not a call, or the text ends within it."""
    name = yield from stream.read_name()
    if not (yield from stream.accept(name_end)):
        return False
    return (yield from _arguments(stream, name, marks))


def _arguments(stream: Stream, name: str, marks: XmlMarks) -> Reading[bool]:
    """Read the arguments of a call of `name`, up to its closing tag. False if they are broken."""
    if name not in stream.names:
        return False
    call = StreamedCall(stream, name)
    types = ArgumentTypes(stream.schemas.get(name))
    keys: set[str] = set()
    call.add("{")
    while True:
        yield from stream.skip_space()
        # An eager stream has emitted the call: the tags after its name cannot become text any more.
        if stream.eager:
            stream.settle()
        if (yield from stream.accept(marks.close)):
            break
        key = yield from _key(stream, marks)
        # JSON readers disagree about a key that occurs twice.
        if key is None or key.name in keys:
            return stream.ended and call.break_off()
        before = ""
        if keys:
            before = ", "
        call.add(f"{before}{json_string(key.name)}: ")
        keys.add(key.name)
        if not (yield from _value(stream, call, types, key, marks)):
            return stream.ended and call.break_off()
    call.add("}")
    if not call.close():
        return False
    stream.settle()
    return True


def _key(stream: Stream, marks: XmlMarks) -> Reading[ArgumentKey | None]:
    """Read the key of the next argument, and all marks before its value; None if there is none."""
    if not (yield from stream.accept(marks.key)):
        return None
    name = yield from stream.read_until(marks.key_end)
    if name is None:
        return None
    if marks.is_string:
        if not (yield from stream.accept(marks.is_string)):
            return None
        word = yield from stream.read_until('">')
        if word not in ("true", "false"):
            return None
        return ArgumentKey(name, word == "true")
    if marks.value:
        name = name.strip()
        yield from stream.skip_space()
        if not (yield from stream.accept(marks.value)):
            return None
    return ArgumentKey(name, None)


def _value(
    stream: Stream,
    call: StreamedCall,
    types: ArgumentTypes,
    key: ArgumentKey,
    marks: XmlMarks,
) -> Reading[bool]:
    """Read the value of an argument, and the mark after it. False if the value is too long, or the
    text ends within it."""
    ends: tuple[str, ...] = (marks.value_end,)
    if marks.on_lines:
        ends = ("\n" + marks.value_end, marks.value_end)
        yield from stream.accept("\n")
    is_string = key.is_string
    if is_string is None:
        is_string = types.is_text(key.name)
    if stream.eager and is_string:
        # Pieces of a string can be escaped one by one, and need not be held back.
        stream.settle()
        call.add('"')
        if not (yield from stream.text_until(*ends, kind=call.as_arguments)):
            return False
        call.add('"')
        stream.settle()
        return True
    limit = MAX_CALL_LEN
    if stream.eager:
        limit = MAX_PENDING
    found = yield from stream.take_until(*ends, limit=limit)
    if found is None or not found.marker:
        return False
    if is_string:
        call.add(json_string(found.text))
    elif key.is_string is None:
        call.add(types.as_json(key.name, found.text))
    else:
        call.add(any_json(found.text))
    if stream.eager:
        stream.settle()
    return True

"""The texts of calls to which a grammar holds a model, as data for each format.

A reader takes many spellings of a call; a grammar allows one or two of them, those that the models
of the format write, and keeps everything else that the reader might take for the beginning of a
call out of the free text around. So each call in an answer is one that the grammar knows. The
server makes structural tags of these texts (`server/chat/call_tags.py`).

Free text cannot contain special tokens, so marks without a meaning of their own are named, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from weft.json_types import JsonObject
from weft.text.parsers import gemma, generic, harmony, readers, xml_calls
from weft.text.parsers.pythonic import LFM2_BEGIN, OLMO3_BEGIN

ANY_TEXT: JsonObject = {"type": "any_text"}
# Keyword arguments that `pythonic.py` reads.
_PYTHON_ARGUMENTS = r"""
start: (keyword (", " keyword)*)?
keyword: NAME "=" value
value: string | NUMBER | "True" | "False" | "None" | list | map
list: "[" (value (", " value)*)? "]"
map: "{" (string ": " value (", " string ": " value)*)? "}"
string: DOUBLE | SINGLE
NAME: /[A-Za-z_][A-Za-z0-9_]*/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
DOUBLE: /"([^"\\\n\r\x00]|\\["'\\nrt])*"/
SINGLE: /'([^'\\\n\r\x00]|\\["'\\nrt])*'/
"""


class Arguments(Protocol):
    """How the arguments of a call are written, as formats of structural tags."""

    @property
    def in_json(self) -> bool:
        """Whether a text stands in the form that it has inside of a JSON string."""
        ...

    @property
    def has_schemas(self) -> bool:
        """Whether `of` holds arguments to their schema."""
        ...

    def of(self, schema: JsonObject) -> JsonObject:
        """Arguments of a function."""
        ...

    def with_text(self, text: JsonObject) -> JsonObject:
        """The one argument `input` of a custom tool; `text`: the format of its value."""
        ...


class JsonArguments:
    """An object in JSON."""

    in_json = True
    has_schemas = True

    def of(self, schema: JsonObject) -> JsonObject:
        return {"type": "json_schema", "json_schema": schema}

    def with_text(self, text: JsonObject) -> JsonObject:
        return in_sequence(fixed('{"input": "'), text, fixed('"}'))


class PythonArguments:
    """Keyword arguments with literals. The form of a text in a JSON string is one of a text in
    Python's, too."""

    in_json = True
    has_schemas = False

    def of(self, schema: JsonObject) -> JsonObject:
        return {"type": "grammar", "syntax": "lark", "definition": _PYTHON_ARGUMENTS}

    def with_text(self, text: JsonObject) -> JsonObject:
        return in_sequence(fixed('input="'), text, fixed('"'))


@dataclass(frozen=True)
class RawText:
    """Arguments each between marks, where a text stands as it is."""

    begin: str  # with KEY in place of the argument's name
    end: str
    mark: str = ""  # a special token inside of arguments
    in_json: ClassVar[bool] = False
    has_schemas: ClassVar[bool] = False

    def of(self, schema: JsonObject) -> JsonObject:
        return {**ANY_TEXT, "passing": [self.mark]} if self.mark else ANY_TEXT

    def with_text(self, text: JsonObject) -> JsonObject:
        return in_sequence(fixed(self.begin.replace("KEY", "input")), text, fixed(self.end))


JSON = JsonArguments()
PYTHON = PythonArguments()


class CallText(NamedTuple):
    """A call: the texts before and after its arguments."""

    before: str  # NAME stands for the tool's name, NUMBER for the digits of any number
    after: str
    arguments: Arguments = JSON


class CallList(NamedTuple):
    """Where calls stand."""

    # The text with which calls begin, wherever it stands; "": calls begin the answer.
    begin: str
    call: CallText
    open: str = ""  # between `begin` and the first call
    separator: str | None = None  # between calls; None: there is one
    end: str = ""
    names_itself: bool = False  # only `begin` with the text before the arguments begins calls


class CallForms(NamedTuple):
    """All calls of a format, and what the free text around must not contain."""

    lists: tuple[CallList, ...]
    # Marks that begin no call, but may be special tokens, or begin like one that does.
    passing: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    # Patterns, with NAMES in place of `f|g`, for the names of the tools.
    never_like: str = ""  # what free text contains nowhere
    never_first: str = ""  # what it does not begin with, at the beginning of the answer
    is_last: bool = False  # nothing follows calls
    has_reasoning: bool = False  # calls may stand in reasoning, so the grammar has it

    @property
    def is_common(self) -> bool:
        """Whether its structural tag has only fields that all grammar libraries know."""
        return not (self.never_like or self.never_first or self.is_last)

    @property
    def has_schemas(self) -> bool:
        return all(one.call.arguments.has_schemas for one in self.lists)


def fixed(text: str) -> JsonObject:
    return {"type": "const_string", "value": text}


def in_sequence(*elements: JsonObject) -> JsonObject:
    return {"type": "sequence", "elements": list(elements)}


_PAIR = CallText('{"name": "NAME", "arguments": ', "}")
_LLAMA = CallText('{"name": "NAME", "parameters": ', "}")
_PYTHON_CALL = CallText("NAME(", ")", PYTHON)
# The beginnings of objects that `json_call` may take for a call. It refuses other keys and names.
_LIKE_A_CALL = (
    r'\{\s*"((tool_)?name"\s*:\s*"((NAMES)"|[^"]*\\)'
    r'|(arguments|parameters|id|type|tool_call_id)"\s*:)'
)


def _qwen(outer: tuple[str, ...]) -> CallForms:
    raw = RawText("\n<parameter=KEY>\n", "\n</parameter>\n")
    call = CallText("NAME>", "</function>", raw)
    return CallForms((CallList(xml_calls.QWEN_FUNCTION, call),), passing=outer)


def _deepseek() -> CallForms:
    before = f"function{readers.DEEPSEEK_SEPARATOR}NAME\n```json\n"
    in_block = CallText(readers.DEEPSEEK_CALL_BEGIN + before, f"\n```{readers.DEEPSEEK_CALL_END}")
    bare = CallText(
        f"{readers.DEEPSEEK_CALL_BEGIN}NAME{readers.DEEPSEEK_SEPARATOR}", readers.DEEPSEEK_CALL_END
    )
    begin, end = readers.DEEPSEEK_CALLS_BEGIN, readers.DEEPSEEK_CALLS_END
    lists = (
        CallList(begin, in_block, separator="\n", end=end),
        CallList(begin, bare, separator="", end=end),
    )
    return CallForms(lists, never=(readers.DEEPSEEK_CALL_BEGIN,))


def _kimi() -> CallForms:
    call = CallText(
        f"{readers.KIMI_CALL_BEGIN}functions.NAME:NUMBER<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    )
    one = CallList(readers.KIMI_SECTION_BEGIN, call, separator="", end="<|tool_calls_section_end|>")
    return CallForms(
        (one,),
        passing=("<think>", "</think>"),
        never=(readers.KIMI_CALL_BEGIN, "<|tool_call_section_begin|>"),
        has_reasoning=True,
    )


def _harmony() -> CallForms:
    """A message to a tool, whose recipient follows the role or the channel; other messages have one
    of three headers."""
    role = f"{harmony.START}assistant"
    lists: list[CallList] = []
    for kind in (" <|constrain|>json", ""):
        content = f"{kind}{harmony.MESSAGE}"
        after_role = CallText(f" to=functions.NAME{harmony.CHANNEL}commentary{content}", "<|call|>")
        after_channel = CallText(f"commentary to=functions.NAME{content}", "<|call|>")
        lists += [
            CallList("", after_role),
            CallList(role, after_role),
            CallList(role, after_channel, open=harmony.CHANNEL),
            CallList(harmony.CHANNEL, after_channel),
        ]
    headers: list[str] = []
    for channel in ("analysis", "commentary", "final"):
        header = f"{harmony.CHANNEL}{channel}{harmony.MESSAGE}"
        headers += [header, role + header]
    return CallForms(
        tuple(lists),
        passing=(*headers, *harmony.ENDS),
        never=(harmony.START, harmony.CHANNEL),
        never_first=r"\s*to=",
        has_reasoning=True,
    )


def _gemma(marks: gemma.GemmaMarks) -> CallForms:
    raw = RawText(f"{{KEY:{marks.quote}", f"{marks.quote}}}", marks.quote)
    return CallForms((CallList(marks.begin, CallText("call:NAME", marks.end, raw)),))


def _minimax_m2() -> CallForms:
    raw = RawText('\n<parameter name="KEY">', "</parameter>\n")
    one = CallList('<invoke name="', CallText('NAME">', "</invoke>", raw))
    return CallForms((one,), passing=(xml_calls.MINIMAX_BEGIN, "</minimax:tool_call>"))


def _deepseek_v32() -> CallForms:
    dsml = xml_calls.DSML
    raw = RawText(f'\n<{dsml}parameter name="KEY" string="true">', f"</{dsml}parameter>\n", dsml)
    one = CallList(f'<{dsml}invoke name="', CallText('NAME">', f"</{dsml}invoke>", raw))
    kinds = ("function_calls", "tool_calls")
    outer = [f"<{end}{dsml}{kind}>" for end in ("", "/") for kind in kinds]
    return CallForms((one,), passing=tuple(outer))


def _step3() -> CallForms:
    raw = RawText('\n<steptml:parameter name="KEY">', "</steptml:parameter>\n")
    begin = "<｜tool_call_begin｜>"
    call = CallText(
        'function<｜tool_sep｜><steptml:invoke name="NAME">',
        "</steptml:invoke><｜tool_call_end｜>",
        raw,
    )
    return CallForms(
        (CallList(begin, call),), passing=(xml_calls.STEP3_CALLS_BEGIN, "<｜tool_calls_end｜>")
    )


def _mistral() -> CallForms:
    marker = readers.MISTRAL_MARKER
    lists = (
        CallList(marker, _PAIR, open=" [", separator=", ", end="]"),
        CallList(marker, CallText("NAME[ARGS]", "")),
    )
    return CallForms(lists)


def _llama3() -> CallForms:
    lists = (
        CallList("", _LLAMA, separator="; "),
        CallList(readers.LLAMA3_TAG, _LLAMA, separator="; "),
    )
    return CallForms(lists, never_first=rf"\s*{_LIKE_A_CALL}", is_last=True)


def _granite() -> CallForms:
    lists = (
        CallList("", _PAIR, open="[", separator=", ", end="]"),
        CallList(readers.PHI4_BEGIN, _PAIR, open="[", separator=", ", end="]"),
    )
    return CallForms(lists, never=("<tool_call>",), never_first=rf"\s*\[\s*{_LIKE_A_CALL}")


def _phi4() -> CallForms:
    lists = (
        CallList(readers.PHI4_BEGIN, _PAIR, end="<|/tool_call|>"),
        CallList("functools[", _PAIR, separator=", ", end="]", names_itself=True),
    )
    spaced = r"functools(\s+\[\s*|\[\s+|\s*)\{"
    return CallForms(lists, never_like=rf"{spaced}|functools\[{_LIKE_A_CALL}")


def _pythonic() -> CallForms:
    one = CallList("[", _PYTHON_CALL, separator=", ", end="]", names_itself=True)
    return CallForms((one,), never_like=r"\[\s*(NAMES)\s*\(")


def _cohere() -> CallForms:
    call = CallText('\n    {"tool_call_id": "NUMBER", "tool_name": "NAME", "parameters": ', "}")
    one = CallList(readers.COHERE_BEGIN, call, open="[", separator=",", end="\n]<|END_ACTION|>")
    marks = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
    return CallForms((one,), passing=marks)


_HERMES = CallText(generic.AROUND[0].removeprefix(generic.CALL), generic.AROUND[1])
_APERTUS = CallText('{"NAME": ', "}")
# By the name of the format.
CALL_FORMS = {
    "hermes": CallForms((CallList(generic.CALL, _HERMES),)),
    "generic": CallForms((CallList(generic.CALL, _HERMES),)),
    "seed_oss": _qwen((xml_calls.SEED_BEGIN, "</seed:tool_call>")),
    "qwen3_coder": _qwen(("<tool_call>", "</tool_call>")),
    "glm45": CallForms(
        (
            CallList(
                "<tool_call>",
                CallText(
                    "NAME",
                    "</tool_call>",
                    RawText(f"\n{xml_calls.GLM_KEY}KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
                ),
            ),
        )
    ),
    "llama3": _llama3(),
    "mistral": _mistral(),
    "deepseek": _deepseek(),
    "minimax_m2": _minimax_m2(),
    "deepseek_v32": _deepseek_v32(),
    "step3": _step3(),
    "lfm2": CallForms(
        (CallList(LFM2_BEGIN, _PYTHON_CALL, open="[", separator=", ", end="]<|tool_call_end|>"),)
    ),
    "hunyuan_a13b": CallForms(
        (CallList("<tool_calls>", _PAIR, open="[", separator=", ", end="]</tool_calls>"),)
    ),
    "minimax_m1": CallForms(
        (CallList("<tool_calls>", _PAIR, open="\n", separator="\n", end="\n</tool_calls>"),)
    ),
    "kimi_k2": _kimi(),
    "gpt_oss": _harmony(),
    "functiongemma": _gemma(gemma.FUNCTION_GEMMA),
    "gemma4": _gemma(gemma.GEMMA4),
    "phi4": _phi4(),
    "granite": _granite(),
    "granite_20b": CallForms((CallList("<function_call>", _PAIR, open=" "),)),
    "cohere": _cohere(),
    "apertus": CallForms(
        (
            CallList(
                readers.APERTUS_BEGIN,
                _APERTUS,
                open="[",
                separator=", ",
                end="]<|tools_suffix|>",
            ),
        )
    ),
    "olmo3": CallForms(
        (CallList(OLMO3_BEGIN, _PYTHON_CALL, open="\n", separator="\n", end="\n</function_calls>"),)
    ),
    "pythonic": _pythonic(),
}

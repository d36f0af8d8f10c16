"""Which format a model writes its calls and its reasoning in: by name, or by its chat template.

A new family is a reader (`readers.py`) and a line in a table here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from functools import partial
from typing import NamedTuple

from weft.text.parsers import readers
from weft.text.parsers.output import Parser
from weft.text.parsers.pythonic import pythonic
from weft.text.parsers.stream import Reading, Stream


class ToolFormat(NamedTuple):
    """How a family of models writes calls."""

    read: Callable[[Stream], Reading[None]]
    # A chat template with this text is of this format; "" if no text shows it.
    mark: str = ""
    other_mark: str = ""  # another such text, which is not written before calls
    # Characters of a call's id behind "call_"; Mistral's templates want 9 and no prefix.
    id_len: int = 24
    # The texts before (with NAME for the name) and behind the arguments of a call.
    around: tuple[str, str] | None = None

    def is_marked(self, source: str) -> bool:
        """Whether the source of chat templates shows that calls are written like this."""
        return any(mark and mark in source for mark in (self.mark, self.other_mark))

    def parser(self, names: Set[str], *, eager: bool, tells_cut: bool = False) -> Parser:
        return Parser(self.read, Stream(names, eager=eager, tells_cut=tells_cut))


class ReasoningFormat(NamedTuple):
    """How a family of models marks its reasoning."""

    begin: str
    end: str
    always: bool = False  # it reasons though neither it nor its template opens the reasoning

    def parser(self, prompt_end: str, *, eager: bool) -> Parser:
        """`prompt_end`: the prompt's last characters, which may open or close the reasoning."""
        inside = self.is_open(prompt_end)
        read = partial(readers.reasoning, begin=self.begin, end=self.end, inside=inside)
        return Parser(read, Stream(eager=eager))

    def is_open(self, prompt_end: str) -> bool:
        """Whether the output begins inside of the reasoning."""
        if prompt_end.rstrip().endswith(self.begin):
            return True
        return self.always and not self.is_closed(prompt_end)

    def is_closed(self, prompt_end: str) -> bool:
        """Whether the prompt has ended the reasoning: there is none in the output."""
        return prompt_end.rstrip().endswith(self.end)


TOOL_FORMATS = {
    "hermes": ToolFormat(
        readers.hermes,
        mark="<tool_call>",
        around=('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
    ),
    "llama3": ToolFormat(
        readers.llama3,
        mark=readers.LLAMA3_TAG,
        other_mark=readers.LLAMA3_TOOL_ROLE,
    ),
    "mistral": ToolFormat(readers.mistral, mark=readers.MISTRAL_MARKER, id_len=9),
    "deepseek": ToolFormat(readers.deepseek, mark=readers.DEEPSEEK_CALL_BEGIN),
    "pythonic": ToolFormat(pythonic),
}
FORCED = ToolFormat(readers.forced)

REASONING_FORMATS = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
}
# The formats that a template can show, in the order in which they are looked for.
_FOUND_REASONING = ("qwen3", "mistral", "kimi")


class Formats(NamedTuple):
    """Of one model. None: nothing is looked for."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None


def find_formats(tools: str, reasoning: str, templates: Iterable[str]) -> Formats:
    """By name; "none" for none, "auto" by the sources of the chat templates.

    Raises KeyError for other names.
    """
    source = "\n".join(templates)
    if tools == "auto":
        tools = _shown_tools(source)
    if reasoning == "auto":
        reasoning = _shown_reasoning(source)
    return Formats(
        tools=None if tools == "none" else TOOL_FORMATS[tools],
        reasoning=None if reasoning == "none" else REASONING_FORMATS[reasoning],
    )


def _shown_tools(source: str) -> str:
    for name, format in TOOL_FORMATS.items():
        if format.is_marked(source):
            return name
    return "none"


def _shown_reasoning(source: str) -> str:
    for name in _FOUND_REASONING:
        if REASONING_FORMATS[name].end in source:
            return name
    return "none"

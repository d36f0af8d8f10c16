"""Which format a model writes its calls and its reasoning in: by name, or by what its chat template shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from functools import partial
from typing import NamedTuple

from weft.text.parsers.deepseek import CALL_BEGIN, deepseek
from weft.text.parsers.forced import forced
from weft.text.parsers.hermes import hermes
from weft.text.parsers.llama3 import TAG, TOOL_ROLE, llama3
from weft.text.parsers.mistral import MARKER, mistral
from weft.text.parsers.parser import Parser
from weft.text.parsers.pythonic import pythonic
from weft.text.parsers.stream import Reading, Stream
from weft.text.parsers.thinking import thinking


class ToolFormat(NamedTuple):
    """How a family of models writes calls."""

    read: Callable[[Stream], Reading[None]]
    mark: str = (
        ""  # a chat template that has this text is of this format; "" if that cannot be told
    )
    other_mark: str = ""  # another such text, which is not written before calls
    id_len: int = (
        24  # characters of a call's id behind "call_"; Mistral's templates want 9 and no prefix
    )
    around: tuple[str, str] | None = (
        None  # what stands before (with NAME for the name) and behind a call's arguments
    )

    def is_marked(self, source: str) -> bool:
        """Whether the source of chat templates tells that calls are written like this."""
        return any(mark and mark in source for mark in (self.mark, self.other_mark))

    def parser(self, names: Set[str], *, eager: bool, tells_cut: bool = False) -> Parser:
        return Parser(self.read, Stream(names, eager=eager, tells_cut=tells_cut))


class ReasoningFormat(NamedTuple):
    """How a family of models marks its reasoning."""

    begin: str
    end: str
    always: bool = False  # it reasons though neither it nor its template opens the reasoning

    def parser(self, prompt_end: str, *, eager: bool) -> Parser:
        """`prompt_end`: the last characters of the prompt, where a template may open or close the reasoning."""
        read = partial(thinking, begin=self.begin, end=self.end, inside=self.is_open(prompt_end))
        return Parser(read, Stream(eager=eager))

    def is_open(self, prompt_end: str) -> bool:
        """Whether the output begins inside of the reasoning."""
        return prompt_end.rstrip().endswith(self.begin) or (
            self.always and not self.is_closed(prompt_end)
        )

    def is_closed(self, prompt_end: str) -> bool:
        """Whether the prompt has ended the reasoning: there is none in the output."""
        return prompt_end.rstrip().endswith(self.end)


TOOL_FORMATS = {
    "hermes": ToolFormat(
        hermes,
        "<tool_call>",
        around=('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
    ),
    "llama3": ToolFormat(llama3, TAG, other_mark=TOOL_ROLE),
    "mistral": ToolFormat(mistral, MARKER, id_len=9),
    "deepseek": ToolFormat(deepseek, CALL_BEGIN),
    "pythonic": ToolFormat(pythonic),
}
FORCED = ToolFormat(forced)

REASONING_FORMATS = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
}
_FOUND_REASONING = ("qwen3", "mistral", "kimi")  # the order in which a template is looked through


class Formats(NamedTuple):
    """Of one model. None: nothing is looked for."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None


def find_formats(tools: str, reasoning: str, templates: Iterable[str]) -> Formats:
    """By name; "none" for none, "auto" by the sources of the chat templates. Raises KeyError for other names."""
    source = "\n".join(templates)
    if tools == "auto":
        tools = next(
            (name for name, format in TOOL_FORMATS.items() if format.is_marked(source)), "none"
        )
    if reasoning == "auto":
        reasoning = next(
            (name for name in _FOUND_REASONING if REASONING_FORMATS[name].end in source), "none"
        )
    return Formats(
        None if tools == "none" else TOOL_FORMATS[tools],
        None if reasoning == "none" else REASONING_FORMATS[reasoning],
    )

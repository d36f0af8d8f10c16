"""The formats of tool calls and reasoning, found by name or by a model's chat template.

A new family needs a reader (`readers.py`) and a line in a table here. The names of SGLang and vLLM
for a format are aliases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from typing import NamedTuple, Protocol

from weft.text.parsers import gemma, generic, harmony, readers, xml_calls
from weft.text.parsers.call_forms import CALL_FORMS, CallForms
from weft.text.parsers.output import Parser
from weft.text.parsers.pythonic import LFM2_BEGIN, OLMO3_BEGIN, lfm2, olmo3, pythonic
from weft.text.parsers.stream import NO_SCHEMAS, Reading, Schema, Stream


class ToolFormat(NamedTuple):
    """The tool call format of a family of models."""

    read: Callable[[Stream], Reading[None]]
    # A chat template that contains this text uses this format; "" if no text identifies it.
    mark: str = ""
    other_mark: str = ""  # another such text, which models do not generate before calls
    # Characters of a call's id after "call_"; Mistral's templates require 9 and no prefix.
    id_len: int = 24
    forms: CallForms | None = None  # the calls to which a grammar holds a model
    # The text before an answer without calls, for models that learnt no format: prompts describe
    # this one (`text/templates/tools_in_messages.py`), and a grammar makes the model choose.
    answer: str = ""

    @property
    def holds_reasoning(self) -> bool:
        """Whether a grammar of calls holds the reasoning as well, as calls may stand in it."""
        return self.forms is not None and self.forms.has_reasoning

    def is_marked(self, source: str) -> bool:
        """Whether the source of chat templates contains a mark of this format."""
        return any(mark and mark in source for mark in (self.mark, self.other_mark))

    def parser(
        self,
        names: Set[str],
        *,
        eager: bool,
        tells_cut: bool = False,
        schemas: Mapping[str, Schema] = NO_SCHEMAS,
    ) -> Parser:
        """A parser for one completion. `names`: the tools that can be called; `schemas`: the
        schemas of their arguments, by name. `eager`, `tells_cut`: see `Stream`."""
        stream = Stream(names, eager=eager, tells_cut=tells_cut, schemas=schemas)
        return Parser(self.read, stream)


class ReasoningReader(Protocol):
    """Reads reasoning between `begin` and `end`. `inside`: it began in the prompt."""

    def __call__(self, stream: Stream, begin: str, end: str, *, inside: bool) -> Reading[None]: ...


class ReasoningFormat(NamedTuple):
    """The reasoning format of a family of models."""

    begin: str
    end: str
    always: bool = False  # the output begins inside the reasoning, even without `begin`
    read: ReasoningReader = readers.reasoning
    # A chat template that contains all these texts uses this format; empty: none identifies it.
    marks: tuple[str, ...] = ()
    # The text before the answer, if there is more than `end`: it also precedes an answer without
    # reasoning.
    answer: str = ""

    def is_marked(self, source: str) -> bool:
        """Whether the source of chat templates contains all marks of this format."""
        return bool(self.marks) and all(mark in source for mark in self.marks)

    def parser(self, prompt_end: str, *, eager: bool) -> Parser:
        """A parser for one completion. `prompt_end`: the last characters of the prompt, which may
        open or close the reasoning."""
        inside = self.is_open(prompt_end)
        read = partial(self.read, begin=self.begin, end=self.end, inside=inside)
        return Parser(read, Stream(eager=eager))

    def is_open(self, prompt_end: str) -> bool:
        """Whether the output begins inside the reasoning."""
        if prompt_end.rstrip().endswith(self.begin):
            return True
        return self.always and not self.is_closed(prompt_end)

    def is_closed(self, prompt_end: str) -> bool:
        """Whether the prompt closes the reasoning, so that the output has none."""
        return prompt_end.rstrip().endswith(self.answer or self.end)

    def delays_answer(self, prompt_end: str) -> bool:
        """Whether the output does not begin with the answer, but with reasoning or `answer`."""
        return bool(self.answer) or self.is_open(prompt_end)


GENERIC = "generic"
# In the order of detection: templates of one format may contain the mark of a later one.
_READERS = {
    "seed_oss": ToolFormat(xml_calls.seed_oss, mark=xml_calls.SEED_BEGIN),
    "qwen3_coder": ToolFormat(xml_calls.qwen3_coder, mark=xml_calls.QWEN_FUNCTION),
    "glm45": ToolFormat(xml_calls.glm45, mark=xml_calls.GLM_KEY),
    "hermes": ToolFormat(readers.hermes, mark="<tool_call>"),
    "llama3": ToolFormat(
        readers.llama3,
        mark=readers.LLAMA3_TAG,
        other_mark=readers.LLAMA3_TOOL_ROLE,
    ),
    "mistral": ToolFormat(readers.mistral, mark=readers.MISTRAL_MARKER, id_len=9),
    "deepseek": ToolFormat(readers.deepseek, mark=readers.DEEPSEEK_CALL_BEGIN),
    "minimax_m2": ToolFormat(xml_calls.minimax_m2, mark=xml_calls.MINIMAX_BEGIN),
    "deepseek_v32": ToolFormat(xml_calls.deepseek_v32, mark=xml_calls.DSML),
    "step3": ToolFormat(xml_calls.step3, mark=xml_calls.STEP3_CALLS_BEGIN),
    "lfm2": ToolFormat(lfm2, mark=LFM2_BEGIN, other_mark="<|tool_list_start|>"),
    "hunyuan_a13b": ToolFormat(readers.hunyuan_a13b, mark=readers.HUNYUAN_BEGIN),
    "minimax_m1": ToolFormat(readers.minimax_m1, mark="<tool_calls>"),
    "kimi_k2": ToolFormat(
        readers.kimi_k2,
        mark=readers.KIMI_CALL_BEGIN,
        other_mark="<|im_system|>tool_declare",  # the first templates show no calls
    ),
    "gpt_oss": ToolFormat(harmony.calls, mark=harmony.FINAL, other_mark="<|channel|>commentary"),
    "functiongemma": ToolFormat(
        partial(gemma.gemma, marks=gemma.FUNCTION_GEMMA),
        mark=gemma.FUNCTION_GEMMA.begin,
    ),
    "gemma4": ToolFormat(partial(gemma.gemma, marks=gemma.GEMMA4), mark=gemma.GEMMA4.begin),
    "phi4": ToolFormat(readers.phi4, mark="<|/tool|>", other_mark="functools["),
    "granite": ToolFormat(readers.granite, mark="<|tool_call|> followed by a JSON list"),
    "granite_20b": ToolFormat(readers.granite_20b, mark="<function_call>"),
    "cohere": ToolFormat(readers.cohere, mark=readers.COHERE_BEGIN),
    "apertus": ToolFormat(readers.apertus, mark=readers.APERTUS_BEGIN),
    "olmo3": ToolFormat(olmo3, mark=OLMO3_BEGIN),
    "pythonic": ToolFormat(pythonic),
    # No mark: a chat template that shows no format gets this one.
    GENERIC: ToolFormat(generic.generic, answer=generic.ANSWER),
}
TOOL_FORMATS = {name: format._replace(forms=CALL_FORMS[name]) for name, format in _READERS.items()}
FORCED = ToolFormat(readers.forced)

_granite_reasoning = partial(
    readers.reasoning_before_tag,
    tag="response",
    begins=readers.GRANITE_BEGINS,
    ends=readers.GRANITE_ENDS,
)
# In the order of detection, as above.
REASONING_FORMATS = {
    "gpt_oss": ReasoningFormat(
        harmony.ANALYSIS,
        harmony.END,
        read=harmony.messages,
        marks=("<|channel|>analysis",),
        answer=harmony.FINAL,
    ),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>", marks=("</seed:think>",)),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", marks=("<|channel>thought",)),
    "granite": ReasoningFormat(
        readers.GRANITE_BEGINS[0],
        readers.GRANITE_ENDS[0],
        read=_granite_reasoning,
        marks=(readers.GRANITE_ENDS[0],),
    ),
    "granite_33": ReasoningFormat(
        "<think>",
        "</think>",
        read=_granite_reasoning,
        marks=("<think></think>", "<response></response>"),
    ),
    "hunyuan_a13b": ReasoningFormat(
        "<think>",
        "</think>",
        read=partial(readers.reasoning_before_tag, tag="answer"),
        marks=("<|extra_0|>", "</think>"),
    ),
    "cohere": ReasoningFormat(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        read=readers.cohere_reasoning,
        marks=("<|START_THINKING|>",),
    ),
    "apertus": ReasoningFormat(
        "<|inner_prefix|>",
        "<|inner_suffix|>",
        marks=("<|inner_prefix|>",),
    ),
    "kimi_k2": ReasoningFormat(
        "<think>",
        "</think>",
        read=readers.kimi_k2_reasoning,
        marks=("</think>", readers.KIMI_SECTION_BEGIN),
    ),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "qwen3": ReasoningFormat("<think>", "</think>", marks=("</think>",)),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", marks=("[/THINK]",)),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷", marks=("◁/think▷",)),
}

# The names of these formats in SGLang and vLLM.
TOOL_ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "granite4": "hermes",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "glm": "glm45",
    "glm47": "glm45",
    "gpt-oss": "gpt_oss",
    "openai": "gpt_oss",
    "minimax": "minimax_m1",
    "minimax-m2": "minimax_m2",
    "phi4_mini_json": "phi4",
    "command_a": "cohere",
    "cohere_command3": "cohere",
    "cohere_command4": "cohere",
    "granite-20b-fc": "granite_20b",
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "llama4_pythonic": "pythonic",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v32",
    "deepseek_v4": "deepseek_v32",
    "deepseekv3": "deepseek",
    "deepseekv31": "deepseek",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
}
REASONING_ALIASES = {
    "gpt-oss": "gpt_oss",
    "openai_gptoss": "gpt_oss",
    "cohere_command3": "cohere",
    "cohere_command4": "cohere",
    "deepseek-r1": "deepseek_r1",
    "deepseek-v3": "qwen3",
    "deepseek_v3": "qwen3",
    "glm45": "qwen3",
    "glm47": "qwen3",
    "qwen3-thinking": "deepseek_r1",
    "minimax": "deepseek_r1",  # the template opens the reasoning, and the model closes it
    "minimax_m2": "deepseek_r1",
    "step3": "deepseek_r1",
    "step3p5": "deepseek_r1",
    "interns1": "qwen3",
    "olmo3": "qwen3",
}


def tool_format(name: str) -> ToolFormat:
    """The format with this name or alias. Raises KeyError."""
    return TOOL_FORMATS[TOOL_ALIASES.get(name, name)]


def reasoning_format(name: str) -> ReasoningFormat:
    """The format with this name or alias. Raises KeyError."""
    return REASONING_FORMATS[REASONING_ALIASES.get(name, name)]


def tool_parser_names() -> tuple[str, ...]:
    """The values of `--tool-call-parser`."""
    return ("auto", "none", *sorted(TOOL_FORMATS), *sorted(TOOL_ALIASES))


def reasoning_parser_names() -> tuple[str, ...]:
    """The values of `--reasoning-parser`."""
    return ("auto", "none", *sorted(REASONING_FORMATS), *sorted(REASONING_ALIASES))


class Formats(NamedTuple):
    """The formats of one model. None: the text is not parsed for it."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None


def find_formats(tools: str, reasoning: str, templates: Iterable[str]) -> Formats:
    """The formats with these names; "none" for no format, "auto" for the format that the sources of
    the chat templates contain; for tools else the generic one, if there is a template.

    Raises KeyError for unknown names.
    """
    source = "\n".join(templates)
    if tools == "auto":
        tools = _shown_tools(source) if source else "none"
    if reasoning == "auto":
        reasoning = _shown_reasoning(source)
    return Formats(
        tools=None if tools == "none" else tool_format(tools),
        reasoning=None if reasoning == "none" else reasoning_format(reasoning),
    )


def _shown_tools(source: str) -> str:
    for name, format in TOOL_FORMATS.items():
        if format.is_marked(source):
            return name
    return GENERIC


def _shown_reasoning(source: str) -> str:
    for name, format in REASONING_FORMATS.items():
        if format.is_marked(source):
            return name
    return "none"

"""Renders a conversation to the text of a prompt, with the model's Jinja template.

Templates come with the model and their arguments from requests, so they run in Jinja's immutable
sandbox, with limits on the size of the output. A server also runs them in another process
(`renderer.py`). Environment and functions are those of Hugging Face templates.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weft.config.numbers import shown
from weft.json_types import JsonObject
from weft.messages.sampling import InvalidParam
from weft.text.surrogates import well_formed
from weft.text.templates.content_format import ContentFormat, content_format
from weft.text.templates.late_system import is_late, with_system_as_text
from weft.text.templates.tools_in_messages import with_tools_in_messages

MAX_OUTPUT_LEN = 16_000_000  # characters
MAX_WIDTH = 1_000_000  # size of one operation's result: repetition, padding, powers
MAX_SOURCE_LEN = 100_000  # characters of a request's own template
MAX_OWN_SOURCE_LEN = 1_000_000  # characters of all templates of a model

# In such templates a tool call is written only as its id, which contains the name (Kimi K2).
_CALLS_BY_ID = "<|tool_call_argument_begin|>"
_ID_WITH_NAME = re.compile(r"functions\.[^:]+:[0-9]+")
# Templates whose messages have their reasoning in `thinking` (gpt-oss).
_THINKING = re.compile(r"message\.thinking|[\"']thinking[\"'] in message")

# Templates that write arguments which are a text as they are.
_ARGUMENTS_AS_TEXT = re.compile(r"arguments['\"\])]*\s+is\s+(?:not\s+)?(?:string|mapping)")

# Answers and results of tools may have no text.
_MAY_BE_SILENT = ("assistant", "tool", "function")

# Names that this module defines for templates: a request's arguments may not use them.
_INTERNAL = frozenset(
    [
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "raise_exception",
        "strftime_now",
        "namespace",
        "range",
        "loop",
        "self",
        "caller",
        "varargs",
        "kwargs",
        "dict",
        "lipsum",
        "cycler",
        "joiner",
        "tokenize",
        "chat_template",
        "conversation",
        "return_tensors",
        "return_dict",
        "padding",
        "truncation",
        "max_length",
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
        "sep_token",
        "cls_token",
        "mask_token",
    ]
)

Message = JsonObject

# Conversations that show what a template does with a system message, first or late.
_SYSTEM: list[Message] = [
    {"role": "system", "content": "text of the system"},
    {"role": "user", "content": "a question"},
]
_LATE_SYSTEM: list[Message] = [
    {"role": "user", "content": "a question"},
    {"role": "assistant", "content": "an answer"},
    {"role": "user", "content": "another question"},
    _SYSTEM[0],
    {"role": "assistant", "content": "another answer"},  # refused if only turns alternate
    {"role": "user", "content": "a last question"},
]


# An answer whose text shows what a template writes between a text and its calls.
_WORDS = "words before a call"
_CALL: JsonObject = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "tool", "arguments": "{}"},
}
_RESULT: Message = {"role": "tool", "tool_call_id": "call00001", "content": "a result"}


class TemplateError(InvalidParam):
    """The template refuses the messages, or cannot render them. The message is for the user."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(param, message)


class _Refusal(Exception):
    """`raise_exception` was called in the template."""


class _PassThrough(Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; here it does nothing."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, with limits on the size of single operations."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        # Each of these operations can make a large value from small ones.
        if operator == "+" and isinstance(left, _SIZED) and isinstance(right, _SIZED):
            _bound(len(left) + len(right), MAX_OUTPUT_LEN)
        elif operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, _SIZED) and isinstance(count, int):
                    _bound(len(value) * max(count, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _bound(left.bit_length() * max(right, 0))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(__obj, "__self__", None), str):  # "x".ljust(10**9)
            _bound_widths(args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped


_SIZED = (str, list, tuple)
_WIDE_FORMAT = re.compile(r"\d{7}|%[^%a-zA-Z]*\*|:[^}]*\{")  # %9999999d, %*d, {:{width}}


def _check_format(format: str) -> None:
    if _WIDE_FORMAT.search(format):
        raise SecurityError(
            "a format of the chat template has a width that is too large or not fixed"
        )


def _bound(size: int, limit: int = MAX_WIDTH) -> None:
    if size > limit:
        raise SecurityError(f"an operation of the chat template would make {size:,} items")


def _bound_widths(arguments: Iterable[Any]) -> None:
    widths = [argument for argument in arguments if isinstance(argument, int)]
    _bound(max(widths, default=0))


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose integer arguments (widths) are bounded."""

    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        _bound_widths((*args, *kwargs.values()))
        return function(value, *args, **kwargs)

    return bounded


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's `tojson`: it makes no HTML escapes, unlike Jinja's own."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _PassThrough],
    )
    environment.filters["tojson"] = _bounded(_tojson)
    for name in ("center", "indent"):
        environment.filters[name] = _bounded(environment.filters[name])
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class Rendered(NamedTuple):
    text: str  # of the prompt
    warnings: tuple[str, ...]  # what was changed because the template does not take it


class ChatTemplate:
    """The chat template of one model."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`sources` by name: "default", and perhaps "tool_use".

        Raises `TemplateError` for broken Jinja.
        """
        check_sources(sources)
        self._own = _compiled(sources)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: list[Message], **options: Any) -> str:
        """The text of `rendered` with these options."""
        return self.rendered(messages, **options).text

    def rendered(
        self,
        messages: list[Message],
        *,
        tools: list[JsonObject] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        source: str | None = None,
        marks: Mapping[Any, str] | None = None,
        tools_in_messages: bool = False,
    ) -> Rendered:
        """The prompt for `messages` in OpenAI's form; `source`: a template instead of the model's.

        With `continue_final_message` the prompt ends directly after the content of the last
        message, which the model then continues. `marks`: the types of content besides text that the
        model takes ("image"), and the text that the template writes for one. With
        `tools_in_messages` the messages have tools, calls and results as text, and the template
        sees none. Raises `TemplateError`.
        """
        shadowed = sorted(_INTERNAL & (kwargs or {}).keys())
        if shadowed:
            raise TemplateError(
                f"chat_template_kwargs may not set {', '.join(shadowed)}",
                "chat_template_kwargs",
            )
        templates = self._own if source is None else _compiled({"default": source})
        used = templates["default"]
        if tools and "tool_use" in templates and not tools_in_messages:
            used = templates["tool_use"]
        warnings: tuple[str, ...] = ()
        if is_late(messages) and not self._has_system(used, _LATE_SYSTEM):
            messages, indices = with_system_as_text(messages, in_results=not tools_in_messages)
            warnings = tuple(map(_as_warning, indices))
        if tools_in_messages:
            has_system = not tools or self._has_system(used, _SYSTEM)
            messages = with_tools_in_messages(messages, tools, has_system=has_system)
            tools = None
        conversation = [
            _normalised(used, message, position, marks or {})
            for position, message in enumerate(messages)
        ]
        if any(map(_ends_before_calls, conversation)):
            self._join_to_calls(used, conversation)
        if used.calls_by_id:
            _put_names_into_ids(conversation)
        cut = ""
        if continue_final_message:
            cut = _mark_end(conversation)
        values = {
            **self._special_tokens,
            **(kwargs or {}),
            "messages": conversation,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = well_formed(_render(used.template, values))
        if not cut:
            return Rendered(text, warnings)
        end = text.rfind(cut)
        if end < 0:
            raise TemplateError(
                "the chat template leaves out the last message, so it cannot be continued"
            )
        return Rendered(text[:end], warnings)

    def _join_to_calls(self, used: _Compiled, conversation: list[Message]) -> None:
        """Take the line breaks that the template writes between a text and its calls from the end
        of the text.

        The text of an answer goes up to its calls, with the breaks that the model wrote. Twice
        in the prompt, they would end the cached prefix.
        """
        num_breaks = self._num_breaks(used)
        for message in conversation:
            if num_breaks and _ends_before_calls(message):
                text = message["content"]
                num_own = len(text) - len(text.rstrip("\n"))
                message["content"] = text[: len(text) - min(num_own, num_breaks)]

    def _num_breaks(self, used: _Compiled) -> int:
        """The number of line breaks that a template writes between a text and its calls; 0 if it
        changes the end of the text, too."""
        texts = []
        for content in (_WORDS, f"{_WORDS}\n"):
            answer = {"role": "assistant", "content": content, "tool_calls": [_CALL]}
            try:
                texts.append(self._example(used, [_SYSTEM[1], answer, _RESULT]))
            except TemplateError:
                return 0
        plain, broken = (text.partition(_WORDS)[2] for text in texts)
        num_breaks = len(plain) - len(plain.lstrip("\n"))
        return num_breaks if broken == f"\n{plain}" else 0

    def _example(self, used: _Compiled, messages: Sequence[Message]) -> str:
        conversation = [_normalised(used, one, index, {}) for index, one in enumerate(messages)]
        values = {
            **self._special_tokens,
            "messages": conversation,
            "tools": None,
            "add_generation_prompt": True,
        }
        return _render(used.template, values)

    def _has_system(self, used: _Compiled, example: Sequence[Message]) -> bool:
        """Whether the template writes the system message of an example after what precedes it."""
        before = [one["content"] for one in example[: example.index(_SYSTEM[0])]]
        try:
            text = self._example(used, example)
        except TemplateError:
            return False
        return text.find(_SYSTEM[0]["content"]) > max(map(text.rfind, before), default=-1)


def _ends_before_calls(message: Message) -> bool:
    """Whether a text that ends with a line break has calls after it."""
    content = message.get("content")
    return bool(message.get("tool_calls")) and isinstance(content, str) and content.endswith("\n")


def _as_warning(index: int) -> str:
    return (
        f"message {index + 1} of the prompt is a system message behind others, which the chat "
        "template does not take there; it became text of the user or of a result, in its place"
    )


def check_sources(sources: Mapping[str, str]) -> None:
    """Check names and lengths of templates before they are compiled. Raises `TemplateError`."""
    if "default" not in sources:
        raise TemplateError(f"no default among the chat templates {sorted(sources)}")
    length = sum(map(len, sources.values()))
    if length > MAX_OWN_SOURCE_LEN:
        raise TemplateError(
            f"the chat template has {length:,} characters; "
            f"at most {MAX_OWN_SOURCE_LEN:,} are allowed"
        )


class _Compiled(NamedTuple):
    template: jinja2.Template
    content_format: ContentFormat
    knows_developer: bool  # False: the role "developer" becomes "system"
    calls_by_id: bool  # ids of tool calls must contain their names
    reads_thinking: bool  # the reasoning of a message is in `thinking`
    reads_texts_as_arguments: bool  # arguments may be a text instead of an object


def _compiled(sources: Mapping[str, str]) -> dict[str, _Compiled]:
    """The compiled templates, by name. Raises `TemplateError`."""
    environment = _environment()

    def compiled(source: str) -> _Compiled:
        found = content_format(environment.parse(source))
        return _Compiled(
            environment.from_string(source),
            found,
            knows_developer="developer" in source,
            calls_by_id=_CALLS_BY_ID in source,
            reads_thinking=_THINKING.search(source) is not None,
            reads_texts_as_arguments=_ARGUMENTS_AS_TEXT.search(source) is not None,
        )

    try:
        return {name: compiled(source) for name, source in sources.items()}
    except Exception as exc:
        # Jinja's errors, and Python's for too deeply nested code.
        raise TemplateError(
            f"the chat template is not valid Jinja: {str(exc)[:300]}",
            "chat_template",
        ) from exc


def _normalised(
    used: _Compiled, message: Message, position: int, marks: Mapping[str, str]
) -> Message:
    """The message as the template expects it.

    Content becomes a string if the template does not read lists, and always a list if it reads only
    lists. The arguments of tool calls become an object. Null content beside tool calls stays null
    only if the template checks for it; other templates would write it as "None".
    """
    message = dict(message)
    message.pop("cache_control", None)  # it is about the prompt, not a part of it
    where = f"messages[{position}]"
    if message.get("role") == "developer" and not used.knows_developer:
        message["role"] = "system"
    message["content"] = _content(
        message.get("content"),
        where,
        as_list=used.content_format.reads_lists,
        marks=marks,
    )
    only_lists = used.content_format.reads_lists and not used.content_format.reads_texts
    if only_lists and isinstance(message["content"], str):
        message["content"] = [{"type": "text", "text": message["content"]}]
    if message["content"] is None:
        if message.get("role") not in _MAY_BE_SILENT:
            raise TemplateError(f"{where} has no content", f"{where}.content")
        if not message.get("tool_calls") or not used.content_format.reads_null:
            message["content"] = ""
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            param = f"{where}.tool_calls"
            raise TemplateError(f"{param} is {shown(calls)}; a list is needed", param)
        message["tool_calls"] = [
            _parsed_call(call, f"{where}.tool_calls[{index}]", used.reads_texts_as_arguments)
            for index, call in enumerate(calls)
        ]
    # Beside a tool call, gpt-oss's template reads content as reasoning, and refuses both.
    has_content = message.get("tool_calls") and message["content"]
    if used.reads_thinking and message.get("reasoning_content") and not has_content:
        message.setdefault("thinking", message["reasoning_content"])
    return message


def _content(
    content: Any, where: str, *, as_list: bool, marks: Mapping[str, str]
) -> str | list[JsonObject] | None:
    """The content as the template reads it. Without `as_list`, the parts are joined to one text,
    one line each, as in vLLM and llama.cpp; pictures are replaced by their marks."""
    if content is None or isinstance(content, str):
        return content
    texts: list[str] = []
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type")
        parts.append({name: value for name, value in part.items() if name != "cache_control"})
        if kind in marks:
            texts.append(marks[kind])
            continue
        param = f"{where}.content[{index}]"
        if kind == "text" and not isinstance(part.get("text"), str):
            raise TemplateError(
                f"{param}.text is {shown(part.get('text'))}; a text is expected", f"{param}.text"
            )
        if kind != "text":
            raise TemplateError(
                f"{param} is of type {str(kind)[:64]!r}, which this model does not support", param
            )
        texts.append(part["text"])
    return parts if as_list else "\n".join(texts)


def _parsed_call(call: Any, where: str, as_text: bool) -> JsonObject:
    """A tool call of the history: OpenAI's arguments are JSON text, templates expect an object.

    Arguments that are no object, for example of a call that was truncated, must not end the
    conversation: the model sees them as text, or as no arguments.
    """
    if not isinstance(call, dict):
        raise TemplateError(f"{where} is {shown(call)}; an object is needed", where)
    function = call.get("function", {})
    if not isinstance(function, dict):
        param = f"{where}.function"
        raise TemplateError(f"{param} is {shown(function)}; an object is needed", param)
    arguments = function.get("arguments")
    found = arguments
    if isinstance(arguments, str):
        found = _object(arguments)
    if not isinstance(found, dict):
        is_shown = as_text and isinstance(arguments, str) and arguments.strip() not in _NO_ARGUMENTS
        found = arguments if is_shown else {}
    return {**call, "function": {**function, "arguments": found}}


_NO_ARGUMENTS = ("", "null")


def _object(text: str) -> JsonObject | None:
    """The object that `text` is in JSON; None if it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _put_names_into_ids(conversation: list[Message]) -> None:
    """Give tool calls and their results ids of the form `functions.NAME:NUMBER`.

    Ids that already have this form stay. Numbers count all tool calls of the conversation.
    """
    new_ids: dict[str | None, str] = {}
    number = 0
    for message in conversation:
        for call in message.get("tool_calls") or ():
            id = call.get("id")
            if id is None or not _ID_WITH_NAME.fullmatch(id):
                new_ids[id] = f"functions.{call['function'].get('name')}:{number}"
                call["id"] = new_ids[id]
            number += 1
        if message.get("role") == "tool":
            id = message.get("tool_call_id")
            message["tool_call_id"] = new_ids.get(id, id)


def _mark_end(conversation: list[Message]) -> str:
    """Append a random mark to the content of the last message. Returns the mark."""
    if not conversation or conversation[-1].get("role") != "assistant":
        raise TemplateError(
            "continue_final_message needs a last message of the assistant",
            "continue_final_message",
        )
    if conversation[-1].get("tool_calls"):
        raise TemplateError(
            "the last message has tool_calls, which come after its content: it cannot be continued",
            "continue_final_message",
        )
    mark = f"<cut-{secrets.token_hex(16)}>"
    last = conversation[-1]
    content = last["content"] or ""
    if isinstance(content, list):
        *parts, last_part = content
        if "text" not in last_part:
            raise TemplateError(
                f"the last message ends with content of type {last_part['type']!r}, "
                "which cannot be continued",
                "continue_final_message",
            )
        content = [*parts, {**last_part, "text": last_part["text"] + mark}]
    else:
        content += mark
    last["content"] = content
    return mark


def _render(template: jinja2.Template, values: JsonObject) -> str:
    pieces: list[str] = []
    length = 0
    try:
        for piece in template.generate(values):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_OUTPUT_LEN:
                raise TemplateError(
                    f"the chat template made more than {MAX_OUTPUT_LEN:,} characters"
                )
    except _Refusal as exc:
        raise TemplateError(str(exc)[:1_000]) from exc
    except (InvalidParam, MemoryError):
        raise
    except Exception as exc:  # a template can raise any exception
        raise TemplateError(
            f"the chat template cannot render these messages: {str(exc)[:300]}"
        ) from exc
    return "".join(pieces)

"""A conversation into the text that the model continues, by the model's Jinja template.

The template comes with the model and its arguments come from requests, so it runs in Jinja's immutable sandbox, in a
thread, with limits on time and on the size of what it makes. Environment and functions are those that Hugging Face
templates are written for.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import re
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weft.messages.sampling import InvalidParam

RENDER_TIMEOUT_S = 5.0
MAX_OUTPUT_LEN = 16_000_000  # characters
MAX_WIDTH = 1_000_000  # of what one operation of a template may make: repetition, padding, powers
MAX_SOURCE_LEN = 100_000  # characters of a template that a request brings

# what the template gets from here: arguments of a request may not take these names
_INTERNAL = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "raise_exception"}
    | {"strftime_now", "namespace", "range", "loop", "self", "caller", "varargs", "kwargs", "dict", "lipsum", "cycler"}
    | {"joiner", "tokenize", "chat_template", "conversation", "return_tensors", "return_dict", "padding", "truncation"}
    | {"max_length", "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"}
)

Message = dict[str, Any]


class TemplateError(InvalidParam):
    """The template refuses the messages, or cannot render them. The message is for the user."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(param, message)


class _Refusal(Exception):
    """`raise_exception` was called in the template."""


class _RenderTimeout(BaseException):
    """Raised into a render thread whose time is over. No template can catch it."""


class _PassThrough(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it does nothing."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Sandbox(ImmutableSandboxedEnvironment):
    """The immutable sandbox, and bounds on operations that make much out of little."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
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
            _bound(max((arg for arg in args if isinstance(arg, int)), default=0))
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
        raise SecurityError("a format of the chat template has a width that is too large or not fixed")


def _bound(size: int, limit: int = MAX_WIDTH) -> None:
    if size > limit:
        raise SecurityError(f"an operation of the chat template would make {size:,} items")


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose integer arguments (widths) are bounded."""

    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        _bound(max((arg for arg in (*args, *kwargs.values()) if isinstance(arg, int)), default=0))
        return function(value, *args, **kwargs)

    return bounded


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face defines it: no HTML escapes, unlike Jinja's own."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _PassThrough])
    environment.filters["tojson"] = _bounded(_tojson)
    for name in ("center", "indent"):
        environment.filters[name] = _bounded(environment.filters[name])
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """The chat template of one model."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`sources` by name: "default", and perhaps "tool_use". Raises `TemplateError` for broken Jinja."""
        if "default" not in sources:
            raise TemplateError(f"no default among the chat templates {sorted(sources)}")
        self._own = _compiled(sources)
        self._special_tokens = dict(special_tokens)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="template")

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        source: str | None = None,
    ) -> str:
        """The prompt for `messages`, as OpenAI writes them, by the template `source` if it is given.

        With `continue_final_message` it ends right behind the last message's content, for the model to go on there.
        Raises `TemplateError`.
        """
        shadowed = sorted(_INTERNAL & (kwargs or {}).keys())
        if shadowed:
            raise TemplateError(f"chat_template_kwargs may not set {', '.join(shadowed)}", "chat_template_kwargs")
        used = self._own if source is None else _compiled({"default": source})
        conversation = [_normalised(used, message, position) for position, message in enumerate(messages)]
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
        text = _render(used.by_name["tool_use" if tools and "tool_use" in used.by_name else "default"], values)
        if not cut:
            return text
        end = text.rfind(cut)
        if end < 0:
            raise TemplateError("the chat template leaves out the last message, so it cannot be continued")
        return text[:end]

    async def render_async(self, messages: list[Message], **options: Any) -> str:
        """`render` in a thread, for at most `RENDER_TIMEOUT_S`."""
        job = _Job(lambda: self.render(messages, **options))
        future = asyncio.get_running_loop().run_in_executor(self._threads, job.run)
        try:
            return await asyncio.wait_for(future, RENDER_TIMEOUT_S)
        except TimeoutError as exc:
            job.kill()
            raise TemplateError(f"the chat template took longer than {RENDER_TIMEOUT_S:g} s") from exc


class _Templates(NamedTuple):
    by_name: dict[str, jinja2.Template]
    knows_developer: bool  # else that role is the system's


def _compiled(sources: Mapping[str, str]) -> _Templates:
    environment = _environment()
    try:
        by_name = {name: environment.from_string(source) for name, source in sources.items()}
    except Exception as exc:  # Jinja's own, and whatever Python says of code that is nested too deeply
        raise TemplateError(f"the chat template is no valid Jinja: {str(exc)[:300]}", "chat_template") from exc
    return _Templates(by_name, "developer" in sources["default"])


def _normalised(used: _Templates, message: Message, position: int) -> Message:
    """The message as templates expect it: content a string, arguments of tool calls an object."""
    message = dict(message)
    where = f"messages[{position}]"
    if message.get("role") == "developer" and not used.knows_developer:
        message["role"] = "system"
    message["content"] = _text_content(message.get("content"), where)
    if message["content"] is None:
        if not message.get("tool_calls"):
            raise TemplateError(f"{where} has no content", f"{where}.content")
        message["content"] = ""
    if message.get("tool_calls"):
        message["tool_calls"] = [_parsed_call(call) for call in message["tool_calls"]]
    return message


def _text_content(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise TemplateError(
                f"content of type {str(part.get('type'))[:64]!r} is not supported by this model", f"{where}.content"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _parsed_call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call of the history: OpenAI has the arguments as JSON text, templates want the object."""
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError) as exc:
            raise TemplateError("the arguments of a tool call are not valid JSON", "messages.tool_calls") from exc
    return {**call, "function": function}


def _mark_end(conversation: list[Message]) -> str:
    """Put a mark that nobody can guess behind the last message's content. Returns it."""
    if not conversation or conversation[-1].get("role") != "assistant":
        raise TemplateError("continue_final_message needs a last message of the assistant", "continue_final_message")
    mark = f"<cut-{secrets.token_hex(16)}>"
    conversation[-1]["content"] += mark
    return mark


def _render(template: jinja2.Template, values: dict[str, Any]) -> str:
    pieces: list[str] = []
    length = 0
    try:
        for piece in template.generate(values):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_OUTPUT_LEN:
                raise TemplateError(f"the chat template made more than {MAX_OUTPUT_LEN:,} characters")
    except _Refusal as exc:
        raise TemplateError(str(exc)[:1_000]) from exc
    except InvalidParam:
        raise
    except Exception as exc:  # a template can raise whatever Python can
        raise TemplateError(f"the chat template cannot render these messages: {str(exc)[:300]}") from exc
    return "".join(pieces)


class _Job:
    """Work in a thread that can be stopped from outside.

    Python has no way to end a thread, but it can raise an exception in one between two bytecodes, and compiled
    templates are bytecode. Single operations that run long in C are what `_Sandbox` bounds.
    """

    def __init__(self, work: Callable[[], str]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._killed = False

    def run(self) -> str:
        with self._lock:
            if self._killed:
                return ""
            self._thread = threading.get_ident()
        try:
            try:
                return self._work()
            finally:
                with self._lock:  # behind this line the thread belongs to another job
                    self._thread = None
        except _RenderTimeout:
            return ""

    def kill(self) -> None:
        with self._lock:
            self._killed = True
            if self._thread is not None:
                thread = ctypes.c_ulong(self._thread)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_RenderTimeout))

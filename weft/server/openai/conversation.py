"""From a chat request to its running generation: the one way that chat completions and all other APIs that speak of
messages take. Those translate their bodies to a `ChatRequest`, and the events of its outputs back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request

from weft.client.generation import Delta, Generation
from weft.client.prompt import Prompt, check_task
from weft.messages.sampling import Grammar, InvalidParam, SamplingParams, ThinkingMarks
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.fields.extra_sampling import soft_budget, thinking_budget, thinking_switch
from weft.server.fields.truncation import Truncation, truncation
from weft.server.openai.custom_tools import (
    CustomCall,
    CustomCalls,
    as_functions,
    with_function_calls,
)
from weft.server.openai.models import ChatMessage, ChatRequest
from weft.server.openai.tools import ToolUse, strict_tag, tool_use
from weft.server.openai.translate import encode_texts, prompts, sampling_params, submit
from weft.text.parsers.events import Event
from weft.text.parsers.formats import FORCED, ReasoningFormat, ToolFormat
from weft.text.parsers.output import ParsedOutput
from weft.text.templates.chat_template import MAX_SOURCE_LEN

_TAIL_LEN = 32  # tokens at the end of a prompt in which a template can open the reasoning


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A chat request that runs."""

    generation: Generation
    prompt: Prompt
    outputs: list[ParsedOutput]  # by choice
    is_plain: bool  # nothing is looked for in the text: events need not be asked of `outputs`
    has_reasoning: bool
    custom_calls: list[CustomCalls]  # by choice
    call_id_len: int

    @property
    def params(self) -> SamplingParams:
        return self.prompt.params

    def events(self, delta: Delta) -> list[Event]:
        """What is new of one completion."""
        return self.outputs[delta.choice].push(delta.text, is_last=delta.end is not None)

    def told(self, delta: Delta) -> list[Event | CustomCall]:
        """The same for APIs that have custom tools."""
        return self.custom_calls[delta.choice].take(
            self.events(delta), is_last=delta.end is not None
        )

    def finish_reason(self, delta: Delta) -> str:
        """Why a completion has ended, in OpenAI's words."""
        assert delta.end is not None
        output = self.outputs[delta.choice]
        has_calls = output.num_calls > 0 and not output.has_cut_call
        return "tool_calls" if has_calls and delta.end.reason == "stop" else delta.end.reason


async def start_chat(
    context: ServerContext,
    request: Request,
    body: ChatRequest,
    *,
    whole_calls: bool = False,
    cut_calls: bool = False,
) -> Conversation:
    """Check, render, tokenize and submit. With `whole_calls` a stream, too, tells calls only when they are complete;
    with `cut_calls` an answer tells a forced call that its end has cut off, for its arguments are a text.

    Raises `ApiError` or `InvalidParam`.
    """
    context.require_model(body.model)
    max_tokens = (
        body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    )
    use = tool_use(body.tools, body.tool_choice, parallel=body.parallel_tool_calls is not False)
    if use.schema is not None:
        body.response_format = None  # that is about what is said beside calls: nothing is
    params = sampling_params(
        body,
        context.info.sampling,
        max_new_tokens=max_tokens,
        logprobs=_num_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
    )
    if use.schema is not None:
        params = _constrained(params, use.schema)
    format = _tool_format(context, use)
    if (
        format is not None
        and format.around is not None
        and use.arguments
        and params.grammar is None
    ):
        params = _strict(params, strict_tag(use.arguments, format.mark, format.around))
    reasons = _reasons(context, body, params)
    if format is not None or reasons:  # their marks may be special tokens
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    if params.thinking_budget is None and context.formats.reasoning is not None:
        params = msgspec.structs.replace(
            params, thinking_budget=soft_budget(body.thinking, body.reasoning_effort)
        )
    params.check(context.client.engine.vocab_size)  # before the work of rendering
    try:
        ids = body.input_ids if body.input_ids is not None else await chat_prompt(context, body)
        if (cut := _truncation(context, body)) is not None:
            ids = cut(ids, context.info.context_length, max_tokens)
        params = _behind_reasoning(context, params, ids)
        [prompt] = prompts(context, request, body, [ids], params)
        generation = submit(context, [prompt], stream=bool(body.stream))
    except InvalidParam as exc:
        if exc.param == "prompt":  # as text and client call it
            exc.param = "messages" if body.input_ids is None else "input_ids"
        raise
    thoughts = context.formats.reasoning if reasons else None
    eager = bool(body.stream) and not whole_calls
    tells_cut = cut_calls and format is FORCED
    outputs = [
        _output(context, body, prompt, use, format, thoughts, eager, tells_cut)
        for _ in range(params.n)
    ]
    return Conversation(
        generation=generation,
        prompt=prompt,
        outputs=outputs,
        is_plain=format is None and not reasons,
        has_reasoning=reasons,
        custom_calls=[CustomCalls(use.custom) for _ in range(params.n)],
        call_id_len=FORCED.id_len
        if context.formats.tools is None
        else context.formats.tools.id_len,
    )


async def chat_prompt(context: ServerContext, body: ChatRequest) -> list[int]:
    """The conversation as token ids, by the model's template."""
    text = await chat_text(context, body)
    special, is_cut = bool(body.add_special_tokens), _truncation(context, body) is not None
    [ids] = await encode_texts(context, [text], add_special_tokens=special, truncates=is_cut)
    return ids


def _truncation(context: ServerContext, body: ChatRequest) -> Truncation | None:
    return truncation(body, auto=context.config.auto_truncate)


async def chat_text(context: ServerContext, body: ChatRequest) -> str:
    """The conversation as the model's template writes it."""
    if context.template is None:
        check_task(SamplingParams(), context.client.engine)
        raise ApiError(
            400,
            "this model has no chat template; use /v1/completions, or give one with --chat-template",
        )
    if not body.messages:
        raise ApiError(400, "there is no message", param="messages")
    if body.chat_template and not context.config.trust_request_chat_template:
        message = "chat_template is not taken from requests; it would be with --trust-request-chat-template"
        raise ApiError(400, message, param="chat_template", code="unsupported_parameter")
    if len(body.chat_template or "") > MAX_SOURCE_LEN:
        raise ApiError(
            400, f"chat_template has more than {MAX_SOURCE_LEN:,} characters", param="chat_template"
        )
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        raise ApiError(
            400,
            "add_generation_prompt and continue_final_message exclude each other",
            param="continue_final_message",
        )
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    thinks = thinking_switch(body.thinking, body.reasoning_effort, thinking_budget(body))
    if thinks is not None:  # templates know it by either name
        kwargs = {"enable_thinking": thinks, "thinking": thinks, **kwargs}
    return await context.template.render(
        [
            with_function_calls(_with_reasoning(message), f"messages[{place}]")
            for place, message in enumerate(body.messages)
        ],
        tools=as_functions(body.tools),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=continued,
        kwargs=kwargs,
        source=body.chat_template or None,
    )


def _with_reasoning(message: ChatMessage) -> ChatMessage:
    """Reasoning has two names; templates know one."""
    if message.reasoning is None:
        return message
    named = message.reasoning if message.reasoning_content is None else message.reasoning_content
    return msgspec.structs.replace(message, reasoning_content=named, reasoning=None)


def _tool_format(context: ServerContext, use: ToolUse) -> ToolFormat | None:
    """How the calls of this request will be written."""
    if not use.names:
        return None
    if use.schema is not None:
        return FORCED
    if context.formats.tools is None:
        raise ApiError(
            400,
            "it is not known how this model writes tool calls: its chat template shows none; "
            "the server needs --tool-call-parser",
            param="tools",
            code="unsupported_parameter",
        )
    return context.formats.tools


def _constrained(params: SamplingParams, schema: dict[str, Any]) -> SamplingParams:
    """The output has to be calls: the grammar sees to it."""
    if params.grammar is not None:
        raise ApiError(
            400, "a forced tool call and another constraint exclude each other", param="tool_choice"
        )
    grammar = Grammar("json_schema", msgspec.json.encode(schema).decode())
    return msgspec.structs.replace(params, grammar=grammar)


def _strict(params: SamplingParams, tag: dict[str, Any]) -> SamplingParams:
    """Calls that the model chooses to make have arguments of their tools' schemas."""
    return msgspec.structs.replace(
        params, grammar=Grammar("structural_tag", msgspec.json.encode(tag).decode())
    )


def _reasons(context: ServerContext, body: ChatRequest, params: SamplingParams) -> bool:
    """Whether reasoning is looked for. An output that is constrained from its first token on has none."""
    is_free = params.grammar is None or not context.config.grammar_in_reasoning
    return (
        context.formats.reasoning is not None and body.separate_reasoning is not False and is_free
    )


def _behind_reasoning(
    context: ServerContext, params: SamplingParams, ids: Sequence[int]
) -> SamplingParams:
    """Let the grammar hold from the end of the reasoning on, if the model reasons and the prompt has not ended it."""
    format, grammar = context.formats.reasoning, params.grammar
    if grammar is None or format is None or context.config.grammar_in_reasoning:
        return params
    prompt_end = context.tokenizer.decode(ids[-_TAIL_LEN:], skip_special_tokens=False)
    if format.is_closed(prompt_end):
        return params
    begin, end = (
        context.tokenizer.encode(mark, add_special_tokens=False)
        for mark in (format.begin, format.end)
    )
    marks = ThinkingMarks(tuple(begin), tuple(end), format.is_open(prompt_end))
    return msgspec.structs.replace(params, grammar=msgspec.structs.replace(grammar, behind=marks))


def _output(
    context: ServerContext,
    body: ChatRequest,
    prompt: Prompt,
    use: ToolUse,
    format: ToolFormat | None,
    thoughts: ReasoningFormat | None,
    eager: bool,
    tells_cut: bool,
) -> ParsedOutput:
    reasoning = None
    if thoughts is not None:
        prompt_end = context.tokenizer.decode(prompt.ids[-_TAIL_LEN:], skip_special_tokens=False)
        reasoning = thoughts.parser(prompt_end, eager=eager)
    tools = None if format is None else format.parser(use.names, eager=eager, tells_cut=tells_cut)
    return ParsedOutput(
        reasoning,
        tools,
        one_call=use.one_call,
        keep_reasoning=body.include_reasoning is not False,
        stream_reasoning=body.stream_reasoning is not False,
    )


def _num_logprobs(body: ChatRequest) -> int | None:
    top = body.top_logprobs or 0
    if top and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    return top if body.logprobs else None

"""Turns a chat request into its running generation, for all APIs with messages.

Other APIs translate their bodies to a `ChatRequest`, and the events of its outputs back. This
module handles templates, tools and reasoning; each API writes its own answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec.structs import replace
from starlette.requests import Request

from weft.client.generation import Delta, Generation, TextDelivery
from weft.client.requests import check_task, pack_ids, unpack_ids
from weft.json_types import JsonObject
from weft.messages.media import MediaItem
from weft.messages.pins import PinMark, ToolPause
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import Grammar, InvalidParam, SamplingParams, ThinkingMarks
from weft.observe.request_context import spent
from weft.server.chat.agents import without_headers
from weft.server.chat.call_tags import call_grammar, unenforced
from weft.server.chat.content import without_media
from weft.server.chat.custom_tools import (
    CustomCall,
    CustomCalls,
    as_functions,
    with_function_calls,
)
from weft.server.chat.marks import chat_marks, has_marked_tool
from weft.server.chat.models import ChatMessage, ChatRequest, PredictedContent, TranslatedChat
from weft.server.chat.tool_paths import ToolPath
from weft.server.chat.tools import NO_TOOLS, ToolUse, tool_use
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.fields.cache_control import TTL_S, CacheMark, new_stamp, num_alike
from weft.server.fields.grammar import RESPONSE_FORMAT, format_is_at
from weft.server.fields.sampling import soft_budget, thinking_budget, thinking_switch
from weft.server.leaving import while_client_waits
from weft.server.media import require_media, require_uncut
from weft.server.prompt_ids import encode_texts, truncation
from weft.server.requests import make_requests, sampling_of, submit
from weft.text.media.sources import MediaSource
from weft.text.parsers.events import CallBegin, Event
from weft.text.parsers.formats import FORCED, ReasoningFormat, ToolFormat
from weft.text.parsers.output import ParsedOutput
from weft.text.templates.chat_template import MAX_SOURCE_LEN
from weft.text.templates.turns import SYSTEM_ROLES
from weft.text.tokenizer import ContextExceeded

_TAIL_LEN = 32  # tokens at the end of a prompt where a template may open the reasoning


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A running chat request."""

    generation: Generation
    request: GenerateRequest
    outputs: list[ParsedOutput]  # by choice
    is_plain: bool  # the text needs no parsing: `outputs` may be bypassed
    has_reasoning: bool
    custom_calls: list[CustomCalls]  # by choice; empty if the request has no custom tools
    call_id_len: int
    # Tells the engine that the client will come back with results of tools.
    pause: Callable[[ToolPause], None] | None = None
    called: list[str] = field(default_factory=list)  # names of tools

    @property
    def params(self) -> SamplingParams:
        return self.request.sampling

    def events(self, delta: Delta) -> list[Event]:
        """The new events of one completion."""
        events = self.outputs[delta.choice].push(delta.text, is_last=delta.end is not None)
        if self.pause is not None:
            self.called.extend(one.name for one in events if isinstance(one, CallBegin))
            if delta.end is not None and self.finish_reason(delta) == "tool_calls":
                id = self.generation.completions[0].spec.request.id
                self.pause(ToolPause(id=id, tools=tuple(self.called)))
        return events

    def events_and_custom_calls(self, delta: Delta) -> Sequence[Event | CustomCall]:
        """Like `events`, for APIs with custom tools."""
        events = self.events(delta)
        if not self.custom_calls:
            return events
        return self.custom_calls[delta.choice].take(events, is_last=delta.end is not None)

    def finish_reason(self, delta: Delta) -> str:
        """The reason for the end of a completion, in OpenAI's words."""
        assert delta.end is not None
        output = self.outputs[delta.choice]
        has_calls = output.num_calls > 0 and not output.has_cut_call
        if has_calls and delta.end.reason == "stop":
            return "tool_calls"
        return delta.end.reason


async def start_chat(
    context: ServerContext,
    request: Request,
    body: ChatRequest,
    *,
    complete_calls: bool = False,
    marks: Sequence[CacheMark[ChatRequest]] = (),
) -> Conversation:
    """Check, render, tokenize and submit.

    `complete_calls`: calls are sent only when they are complete, also in a stream. Otherwise an
    answer contains the beginning of a call that was truncated at its end.
    `marks`: those of another API's body that `body` was made from.

    Raises `ApiError` or `InvalidParam`.
    """
    use = NO_TOOLS
    if body.tools is not None or body.tool_choice is not None:
        use = tool_use(
            body.tools,
            body.tool_choice,
            parallel=_is_parallel(context, body),
            paths=_tool_paths(body),
        )
    tool_format = _tool_format(context, body, use)
    of_calls = _grammar_of_calls(body, use, tool_format)
    params = _sampling(context, body, use, of_calls)
    is_enforced = of_calls is not None and params.grammar is of_calls
    unenforced_grammars = unenforced(use, is_enforced=is_enforced)
    # Reasoning in which calls may stand is a part of their grammar.
    holds_reasoning = is_enforced and tool_format is not None and tool_format.holds_reasoning
    has_reasoning = _looks_for_reasoning(context, body, params) or (
        holds_reasoning and context.formats.reasoning is not None
    )
    if tool_format is not None or has_reasoning:  # their marks may be special tokens
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    params.check(context.client.engine.vocab_size)  # before the work of rendering
    valid = params
    try:
        prompt = await _prompt_ids(context, body, params)
        ids, media = prompt.ids, prompt.media
        if holds_reasoning:
            params = _beside_reasoning(context, params, ids)
        elif params.grammar is not None:
            params = _after_reasoning(context, params, params.grammar, ids)
        [made] = make_requests(context, request, body, [ids], params)
        if media:
            made = replace(made, media=media)
        if body.prediction is not None:
            made = replace(made, prediction=await _predicted(context, body.prediction))
        is_marked = prompt.is_marked or body.cache_control is not None or bool(marks)
        if is_marked and not prompt.is_cut:
            made = replace(made, pins=await _pins(context, body, prompt, marks))
        if use.names and params.n == 1:
            made = replace(made, may_pause=True)
        delivery = _delivery(context, body, made)
        generation = submit(context, [made], [delivery], stream=bool(body.stream), valid=valid)
        generation.warn((*prompt.warnings, *unenforced_grammars))
    except InvalidParam as exc:
        if exc.param == "prompt":  # the name in `text` and `client`
            exc.param = "messages" if body.input_ids is None else "input_ids"
        raise
    parsing = _Parsing(
        reasoning=context.formats.reasoning if has_reasoning else None,
        tools=tool_format,
        use=use,
        complete_calls=complete_calls,
    )
    own_tools = context.formats.tools
    return Conversation(
        generation=generation,
        request=made,
        outputs=[_output(context, body, made, parsing) for _ in range(params.n)],
        is_plain=tool_format is None and not has_reasoning,
        has_reasoning=has_reasoning,
        custom_calls=[CustomCalls(use.custom) for _ in range(params.n)] if use.custom else [],
        call_id_len=FORCED.id_len if own_tools is None else own_tools.id_len,
        pause=context.client.send if made.may_pause else None,
    )


# ---- sampling


def _sampling(
    context: ServerContext, body: ChatRequest, use: ToolUse, of_calls: Grammar | None
) -> SamplingParams:
    """The sampling parameters, with the grammar for the use of tools, and the budget of a reasoning
    switch."""
    top_logprobs = body.top_logprobs or 0
    if top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    if use.schema is not None:
        body.response_format = None  # it constrains text beside calls: there is none
    with format_is_at(_format_path(body)):
        params = sampling_of(
            body,
            context.info.sampling,
            max_new_tokens=_max_tokens(body),
            logprobs=top_logprobs if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
        )
    if of_calls is not None:
        params = _with_calls(params, use, of_calls)
    if params.thinking_budget is None and context.formats.reasoning is not None:
        budget = soft_budget(body.thinking, body.reasoning_effort)
        params = msgspec.structs.replace(params, thinking_budget=budget)
    return params


def _max_tokens(body: ChatRequest) -> int | None:
    if body.max_completion_tokens is not None:
        return body.max_completion_tokens
    return body.max_tokens


def _grammar_of_calls(
    body: ChatRequest, use: ToolUse, tool_format: ToolFormat | None
) -> Grammar | None:
    """The grammar for the use of tools, if it needs one."""
    if tool_format is None:
        return None
    # A prompt of the client's, or an answer that goes on, has no position for the mark.
    has_mark = body.input_ids is None and not body.continue_final_message
    return call_grammar(use, tool_format, has_mark=has_mark)


def _with_calls(params: SamplingParams, use: ToolUse, of_calls: Grammar) -> SamplingParams:
    """Parameters with the grammar of calls. Another constraint overrides optional calls."""
    if params.grammar is None:
        return _with_grammar(params, of_calls)
    if use.schema is None:
        return params
    message = "a forced tool call and another constraint exclude each other"
    raise ApiError(400, message, param="tool_choice")


def _with_grammar(params: SamplingParams, grammar: Grammar | None) -> SamplingParams:
    return msgspec.structs.replace(params, grammar=grammar)


def _after_reasoning(
    context: ServerContext, params: SamplingParams, grammar: Grammar, ids: Sequence[int]
) -> SamplingParams:
    """Apply the grammar only from the end of the reasoning on.

    This happens if the model reasons, and the prompt has not closed the reasoning.
    """
    format = context.formats.reasoning
    if format is None or context.config.grammar_in_reasoning:
        return params
    prompt_end = context.tokenizer.decode(ids[-_TAIL_LEN:], skip_special_tokens=False)
    if format.is_closed(prompt_end):
        return params
    begin = context.tokenizer.encode(format.begin, add_special_tokens=False)
    end = context.tokenizer.encode(format.answer or format.end, add_special_tokens=False)
    marks = ThinkingMarks(tuple(begin), tuple(end), format.delays_answer(prompt_end))
    return _with_grammar(params, msgspec.structs.replace(grammar, behind=marks))


def _beside_reasoning(
    context: ServerContext, params: SamplingParams, ids: Sequence[int]
) -> SamplingParams:
    """The marks of the reasoning for its budget, as the grammar does not wait for them."""
    format = context.formats.reasoning
    if format is None or params.thinking_budget is None:
        return params
    tail = context.tokenizer.decode(ids[-_TAIL_LEN:], skip_special_tokens=False)
    begin = context.tokenizer.encode(format.begin, add_special_tokens=False)
    end = context.tokenizer.encode(format.end, add_special_tokens=False)
    marks = ThinkingMarks(tuple(begin), tuple(end), format.is_open(tail))
    return msgspec.structs.replace(params, thinking_marks=marks)


# ---- the prompt


async def _predicted(context: ServerContext, prediction: PredictedContent) -> bytes:
    """The ids of the text that the client expects. A text longer than any answer is truncated: this
    is no error, and has no effect."""
    content = prediction.content
    if not isinstance(content, str):
        content = "".join(part.text or "" for part in content)
    if not content:
        return b""
    [ids] = await encode_texts(context, [content], add_special_tokens=False, truncates=True)
    return pack_ids(ids[: context.info.context_length], context.client.engine.vocab_size)


def _delivery(context: ServerContext, body: ChatRequest, made: GenerateRequest) -> TextDelivery:
    """Stop strings and patterns end only the answer, not the reasoning before it, unless the
    request wants them to."""
    params = made.sampling
    delivery = TextDelivery(body.stream_interval or context.config.stream_interval)
    format = context.formats.reasoning
    if format is None or body.stop_in_reasoning or not (params.stop or params.stop_regex):
        return delivery
    if params.grammar is not None and context.config.grammar_in_reasoning:
        return delivery
    tail = unpack_ids(made.input_ids)[-_TAIL_LEN:].tolist()
    prompt_end = context.tokenizer.decode(tail, skip_special_tokens=False)
    return delivery._replace(reasoning=partial(format.parser, prompt_end, eager=True))


class ChatText(NamedTuple):
    text: str  # output of the model's template, with a mark for each of `sources`
    sources: list[MediaSource]  # images, videos and sounds
    is_marked: bool
    warnings: tuple[str, ...]


class ChatPrompt(NamedTuple):
    ids: list[int]
    media: tuple[MediaItem, ...] = ()  # images, videos and sounds; `ids` have their placeholders
    is_marked: bool = False  # whether a block has a cache_control
    warnings: tuple[str, ...] = ()  # of the template
    is_cut: bool = False  # tokens are missing: no part is pinned
    rendered: ChatText | None = None  # None: the request has ids


async def _prompt_ids(
    context: ServerContext, body: ChatRequest, params: SamplingParams
) -> ChatPrompt:
    """The ids of the request, or those of its messages; truncated if requested."""
    cut = truncation(context, body.truncate_prompt_tokens, body.truncation_side)
    prompt = None
    if body.input_ids is None:
        prompt = await chat_prompt(context, body)
        if cut is None or prompt.media:
            return prompt
    ids = body.input_ids if prompt is None else prompt.ids
    assert ids is not None, "messages have become ids"
    if prompt is None:
        sources = _sources(body.messages)
        if sources:
            return await _with_media(context, body, "", sources)
    if cut is not None:
        ids = cut.cut(ids, context.info.context_length, params.max_new_tokens)
    if prompt is None:
        return ChatPrompt(ids)
    return prompt._replace(ids=ids, is_cut=len(ids) < len(prompt.ids))


async def chat_prompt(
    context: ServerContext, body: ChatRequest, bytes_before: int = 0
) -> ChatPrompt:
    """The conversation as token ids, rendered by the model's template. `bytes_before`: bytes of the
    encoder inputs of other prompts of the request."""
    rendered = await chat_text(context, body)
    text, sources, is_marked, warnings = rendered
    if sources:
        found = await _with_media(context, body, text, sources, bytes_before)
        return found._replace(is_marked=is_marked, warnings=warnings, rendered=rendered)
    cut = truncation(context, body.truncate_prompt_tokens, body.truncation_side)
    special = bool(body.add_special_tokens)
    [ids] = await encode_texts(
        context,
        [text],
        add_special_tokens=special,
        truncates=cut is not None,
    )
    return ChatPrompt(ids, (), is_marked, warnings, rendered=rendered)


async def _pins(
    context: ServerContext,
    body: ChatRequest,
    prompt: ChatPrompt,
    marks: Sequence[CacheMark[ChatRequest]],
) -> tuple[PinMark, ...]:
    """The ends of a prompt's marked blocks in its tokens, in ascending order. Of a prompt with
    media, only the part before the first item counts."""
    marks = marks or chat_marks(body)
    text, sources, *_ = prompt.rendered or await chat_text(context, body)
    if sources:
        for media_mark in require_media(context.media, sources).marks.values():
            text = text.partition(media_mark)[0]
    stamp = new_stamp()
    lengths: dict[int, float] = {}  # time to live by length in characters
    for mark in marks:
        varied = await chat_text(context, mark.varied(stamp))
        if stamp not in varied.text:
            continue  # the template omits the block
        length = num_alike(text, varied.text)
        lengths[length] = max(lengths.get(length, 0.0), TTL_S[mark.lasts])
    if not lengths:
        return ()
    found = await encode_texts(
        context,
        [text[:length] for length in lengths],
        add_special_tokens=bool(body.add_special_tokens),
        truncates=True,
    )
    ends: dict[int, float] = {}  # time to live by length in tokens
    for beginning, ttl_s in zip(found, lengths.values(), strict=True):
        end = num_alike(prompt.ids, beginning)
        ends[end] = max(ends.get(end, 0.0), ttl_s)
    return tuple(PinMark(length=end, ttl_s=ends[end]) for end in sorted(ends) if end)


def _sources(messages: Sequence[ChatMessage]) -> list[MediaSource]:
    """The images, videos and sounds of messages that are not rendered."""
    found: list[MediaSource] = []
    for index, message in enumerate(messages):
        if isinstance(message.content, list):
            found += without_media(message, message.content, f"messages[{index}]")[1]
    return found


async def _with_media(
    context: ServerContext,
    body: ChatRequest,
    text: str,
    sources: Sequence[MediaSource],
    bytes_before: int = 0,
) -> ChatPrompt:
    """The prompt of `text`, or of the ids of the request, with the loaded media of `sources`."""
    media = require_media(context.media, sources, body.mm_processor_kwargs)
    require_uncut(body.truncate_prompt_tokens)
    loaded = await media.load(sources, context.info.context_length, bytes_before)
    if body.input_ids is not None:
        return ChatPrompt(body.input_ids, media.in_tokens(body.input_ids, loaded, "input_ids"))
    text, in_order = media.in_text(text, loaded, "messages")
    special = bool(body.add_special_tokens)
    try:
        [ids] = await encode_texts(context, [text], add_special_tokens=special)
    except ContextExceeded as exc:
        num_media = sum(one.num_tokens for one in in_order)
        message = f"{exc}; {num_media:,} of them stand for images, videos or sounds"
        raise ContextExceeded(exc.param, message) from exc
    return ChatPrompt(ids, media.in_tokens(ids, in_order, "messages"))


async def chat_text(context: ServerContext, body: ChatRequest) -> ChatText:
    """The conversation as text, rendered by the model's template."""
    if context.template is None:
        check_task(SamplingParams(), context.client.engine)
        raise ApiError(
            400,
            "this model has no chat template; "
            "use /v1/completions, or give one with --chat-template",
        )
    if not body.messages:
        raise ApiError(400, "messages is empty; at least one message is needed", param="messages")
    if body.chat_template:
        _check_template(context, body.chat_template)
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        raise ApiError(
            400,
            "add_generation_prompt and continue_final_message exclude each other",
            param="continue_final_message",
        )
    messages = []
    sources: list[MediaSource] = []
    has_marks = body.tools is not None and has_marked_tool(body.tools)
    for index, message in enumerate(body.messages):
        if message.cache_control is not None:
            has_marks = True
        if isinstance(message.content, list):
            has_marks = has_marks or any(part.cache_control for part in message.content)
            message, of_message = without_media(message, message.content, f"messages[{index}]")
            sources += of_message
        if message.role in SYSTEM_ROLES:
            message = without_headers(message)
        if message.reasoning is not None:
            message = _with_one_reasoning(message)
        if message.tool_calls:
            message = with_function_calls(message, f"messages[{index}]")
        messages.append(message)
    marks = None
    if sources:
        marks = require_media(context.media, sources).marks
    rendering = context.template.rendered(
        messages,
        tools=as_functions(body.tools, _tool_paths(body)),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=continued,
        kwargs=_template_kwargs(body),
        source=body.chat_template or None,
        marks=marks,
        tools_in_messages=_has_generic_calls(context),
    )
    # A template of the request can be long work; the model's own is not the client's choice.
    began_s = time.perf_counter()
    rendered = await (while_client_waits(rendering) if body.chat_template else rendering)
    spent("render", began_s)
    return ChatText(rendered.text, sources, has_marks, rendered.warnings)


def _check_template(context: ServerContext, source: str) -> None:
    """Raise `ApiError` for a template that the server does not accept from a request."""
    if not context.config.trust_request_chat_template:
        message = (
            "this server takes no chat_template from requests; start it with "
            "--trust-request-chat-template"
        )
        raise ApiError(
            400,
            message,
            param="chat_template",
            code="unsupported_parameter",
        )
    if len(source) > MAX_SOURCE_LEN:
        message = f"chat_template has more than {MAX_SOURCE_LEN:,} characters"
        raise ApiError(400, message, param="chat_template")


def _template_kwargs(body: ChatRequest) -> JsonObject:
    """Variables of the template; those in `chat_template_kwargs` override."""
    kwargs: JsonObject = {}
    thinks = thinking_switch(body.thinking, body.reasoning_effort, thinking_budget(body))
    if thinks is not None:  # templates use either name
        kwargs["enable_thinking"] = thinks
        kwargs["thinking"] = thinks
    kwargs.update(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return kwargs


def _with_one_reasoning(message: ChatMessage) -> ChatMessage:
    """A message with its reasoning under the name that templates use."""
    reasoning = message.reasoning_content
    if reasoning is None:
        reasoning = message.reasoning
    return msgspec.structs.replace(
        message,
        reasoning_content=reasoning,
        reasoning=None,
    )


# ---- parsing the output


def _tool_format(context: ServerContext, body: ChatRequest, use: ToolUse) -> ToolFormat | None:
    """The format of this request's calls; None if it can have none. Raises `ApiError` if the format
    is unknown."""
    own = context.formats.tools
    if _has_generic_calls(context) and body.tools:
        return own  # also without calls: the answer has its mark
    if not use.names:
        return None
    if use.schema is not None:
        return FORCED
    if own is None:
        raise ApiError(
            400,
            "this server looks for no tool calls in answers; start it with another "
            "--tool-call-parser than none, or force a call by tool_choice",
            param="tools",
            code="unsupported_parameter",
        )
    return own


def _tool_paths(body: ChatRequest) -> Sequence[ToolPath]:
    """The paths of a request's tools in another API's body; empty if it has its own."""
    return body.tool_paths if isinstance(body, TranslatedChat) else ()


def _format_path(body: ChatRequest) -> str:
    """The field of the client's body that has the form of the answer."""
    if isinstance(body, TranslatedChat):
        return body.format_path
    return RESPONSE_FORMAT


def _is_parallel(context: ServerContext, body: ChatRequest) -> bool:
    """Whether an answer may have several calls. Models that learnt no calls repeat them until their
    tokens are used up, so there the client must ask for several."""
    if body.parallel_tool_calls is None:
        return not _has_generic_calls(context)
    return body.parallel_tool_calls


def _has_generic_calls(context: ServerContext) -> bool:
    """Whether prompts describe tools and calls themselves, as the chat template knows none."""
    return context.formats.tools is not None and bool(context.formats.tools.answer)


def _looks_for_reasoning(
    context: ServerContext,
    body: ChatRequest,
    params: SamplingParams,
) -> bool:
    """Whether to parse reasoning: an output that is constrained from its first token on has
    none."""
    if context.formats.reasoning is None or body.separate_reasoning is False:
        return False
    return params.grammar is None or not context.config.grammar_in_reasoning


@dataclass(frozen=True, kw_only=True)
class _Parsing:
    """The parsers of a request's outputs."""

    reasoning: ReasoningFormat | None
    tools: ToolFormat | None
    use: ToolUse
    complete_calls: bool  # only complete calls; else also the beginning of one, as a stream has it


def _output(
    context: ServerContext, body: ChatRequest, made: GenerateRequest, parsing: _Parsing
) -> ParsedOutput:
    reasoning = None
    if parsing.reasoning is not None:
        tail = unpack_ids(made.input_ids)[-_TAIL_LEN:].tolist()
        prompt_end = context.tokenizer.decode(tail, skip_special_tokens=False)
        reasoning = parsing.reasoning.parser(prompt_end, eager=not parsing.complete_calls)
    tools = None
    if parsing.tools is not None:
        tools = parsing.tools.parser(
            parsing.use.names,
            eager=not parsing.complete_calls,
            tells_cut=not parsing.complete_calls,
            schemas=parsing.use.schemas,
        )
    return ParsedOutput(
        reasoning,
        tools,
        one_call=parsing.use.one_call,
        only_calls=parsing.use.schema is not None,
        keep_reasoning=body.include_reasoning is not False,
        stream_reasoning=body.stream_reasoning is not False,
    )

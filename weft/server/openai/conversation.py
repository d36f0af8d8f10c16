"""From a chat request to its running generation: the one way that chat completions and all other APIs that speak of
messages take. Those translate their bodies to a `ChatRequest`, and the events of its outputs back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request

from weft.messages.sampling import Grammar, InvalidParam, SamplingParams
from weft.server.errors import ApiError
from weft.server.info import Front
from weft.server.openai.models import ChatRequest
from weft.server.openai.tools import ToolUse, tool_use
from weft.server.openai.translate import encode_texts, prompts, sampling_params, submit
from weft.text.generation import Delta, Generation, Prompt
from weft.text.parsers.events import Event
from weft.text.parsers.formats import FORCED, ReasoningFormat, ToolFormat
from weft.text.parsers.output import Output

_TAIL_LEN = 32  # tokens at the end of a prompt in which a template can open the reasoning


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A chat request that runs."""

    generation: Generation
    prompt: Prompt
    outputs: list[Output]  # by choice
    is_plain: bool  # nothing is looked for in the text: events need not be asked of `outputs`
    has_reasoning: bool
    call_id_len: int

    @property
    def params(self) -> SamplingParams:
        return self.prompt.params

    def events(self, delta: Delta) -> list[Event]:
        """What is new of one completion."""
        return self.outputs[delta.choice].push(delta.text, is_last=delta.end is not None)

    def finish_reason(self, delta: Delta) -> str:
        """Why a completion has ended, in OpenAI's words."""
        assert delta.end is not None
        has_calls = self.outputs[delta.choice].num_calls > 0
        return "tool_calls" if has_calls and delta.end.reason == "stop" else delta.end.reason


async def start_chat(front: Front, request: Request, body: ChatRequest, *, whole_calls: bool = False) -> Conversation:
    """Check, render, tokenize and submit. With `whole_calls` a stream, too, tells calls only when they are complete.

    Raises `ApiError` or `InvalidParam`.
    """
    front.require_model(body.model)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = sampling_params(body, max_new_tokens=max_tokens, logprobs=_num_logprobs(body))
    use = tool_use(body.tools, body.tool_choice, parallel=body.parallel_tool_calls is not False)
    if use.schema is not None:
        params = _constrained(params, use.schema)
    format = _tool_format(front, use)
    reasons = _reasons(front, body, params)
    if format is not None or reasons:  # their marks may be special tokens
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    params.check(front.client.engine.vocab_size)  # before the work of rendering
    try:
        ids = body.input_ids if body.input_ids is not None else await chat_prompt(front, body)
        [prompt] = prompts(front, request, body, [ids], params)
        generation = submit(front, [prompt], stream=bool(body.stream))
    except InvalidParam as exc:
        if exc.param == "prompt":  # as text and client call it
            exc.param = "messages" if body.input_ids is None else "input_ids"
        raise
    thoughts = front.formats.reasoning if reasons else None
    eager = bool(body.stream) and not whole_calls
    outputs = [_output(front, body, prompt, use, format, thoughts, eager) for _ in range(params.n)]
    return Conversation(
        generation=generation,
        prompt=prompt,
        outputs=outputs,
        is_plain=format is None and not reasons,
        has_reasoning=reasons,
        call_id_len=FORCED.id_len if front.formats.tools is None else front.formats.tools.id_len,
    )


async def chat_prompt(front: Front, body: ChatRequest) -> list[int]:
    """The conversation as token ids, by the model's template."""
    if front.template is None:
        raise ApiError(400, "this model has no chat template; use /v1/completions, or give one with --chat-template")
    if not body.messages:
        raise ApiError(400, "there is no message", param="messages")
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        raise ApiError(
            400, "add_generation_prompt and continue_final_message exclude each other", param="continue_final_message"
        )
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    text = await front.template.render_async(
        [_message(message) for message in msgspec.to_builtins(body.messages)],
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=continued,
        kwargs=kwargs,
    )
    [ids] = await encode_texts(front, [text], add_special_tokens=bool(body.add_special_tokens))
    return ids


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning has two names; templates know one."""
    if "reasoning" in message:
        message.setdefault("reasoning_content", message.pop("reasoning"))
    return message


def _tool_format(front: Front, use: ToolUse) -> ToolFormat | None:
    """How the calls of this request will be written."""
    if not use.names:
        return None
    if use.schema is not None:
        return FORCED
    if front.formats.tools is None:
        raise ApiError(
            400,
            "it is not known how this model writes tool calls: its chat template shows none; "
            "the server needs --tool-call-parser",
            param="tools",
            code="unsupported_parameter",
        )
    return front.formats.tools


def _constrained(params: SamplingParams, schema: dict[str, Any]) -> SamplingParams:
    """The output has to be calls: the grammar sees to it."""
    if params.grammar is not None:
        raise ApiError(400, "a forced tool call and another constraint exclude each other", param="tool_choice")
    grammar = Grammar("json_schema", msgspec.json.encode(schema).decode())
    return msgspec.structs.replace(params, grammar=grammar)


def _reasons(front: Front, body: ChatRequest, params: SamplingParams) -> bool:
    """Whether reasoning is looked for. An output that is constrained from its first token on has none."""
    return front.formats.reasoning is not None and body.separate_reasoning is not False and params.grammar is None


def _output(
    front: Front,
    body: ChatRequest,
    prompt: Prompt,
    use: ToolUse,
    format: ToolFormat | None,
    thoughts: ReasoningFormat | None,
    eager: bool,
) -> Output:
    reasoning = None
    if thoughts is not None:
        prompt_end = front.tokenizer.decode(prompt.ids[-_TAIL_LEN:], skip_special_tokens=False)
        reasoning = thoughts.parser(prompt_end, eager=eager)
    tools = None if format is None else format.parser(use.names, eager=eager)
    return Output(
        reasoning,
        tools,
        one_call=use.one_call,
        keep_reasoning=body.include_reasoning is not False,
        stream_reasoning=body.stream_reasoning is not False,
    )


def _num_logprobs(body: ChatRequest) -> int | None:
    top = body.top_logprobs or 0
    if top < 0:
        raise ApiError(400, f"top_logprobs is {top}; it must be at least 0", param="top_logprobs")
    if top and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    return top if body.logprobs else None

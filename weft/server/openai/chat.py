"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weft.client.aux_outputs import last_state, prompt_logprobs
from weft.client.generation import Delta
from weft.server.body import json_bytes, read_json, written
from weft.server.context import ServerContext
from weft.server.openai.conversation import Conversation, chat_prompt, start_chat
from weft.server.openai.custom_tools import CustomCall
from weft.server.openai.models import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    CustomInput,
    CustomToolCall,
    FunctionCall,
    FunctionDelta,
    InputTokens,
    PromptLogprob,
    StreamOptions,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from weft.server.openai.prompt_logprobs import vllm_logprobs
from weft.server.openai.tools import call_id
from weft.server.openai.translate import (
    Header,
    UsageCount,
    chat_logprobs,
    header,
    reasoning_details,
)
from weft.server.sglang.meta_info import meta_info
from weft.server.stream import Answer
from weft.text.parsers.events import AnswerText, CallArguments, CallBegin, Event, ReasoningText
from weft.text.tokenizer import Tokenizer


async def chat_completions(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, ChatRequest)
    conversation = await start_chat(context, request, body, cut_calls=True)
    reply = ChatReply(
        context.tokenizer,
        header(context, "chatcmpl-", conversation.prompt.rid),
        conversation,
        body=body,
        weight_version=lambda: context.client.weight_version,
    )
    return Answer(conversation.generation, reply)


async def input_tokens(context: ServerContext, request: Request) -> ASGIApp:
    """How many tokens the prompt of such a request would have."""
    body = await read_json(context, request, ChatRequest)
    context.require_model(body.model)
    ids = await chat_prompt(context, body) if body.input_ids is None else body.input_ids
    return Response(json_bytes(InputTokens(len(ids))), media_type="application/json")


class ChatReply:
    """Chat completions as bytes. Chunks of plain text, which are nearly all, are put together from prepared parts."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        header: Header,
        conversation: Conversation,
        *,
        body: ChatRequest,
        weight_version: Callable[[], str],
    ) -> None:
        ids = conversation.prompt.ids
        options, return_ids = body.stream_options or StreamOptions(), bool(body.return_token_ids)
        self._tokenizer = tokenizer
        self._header = header
        self._conversation = conversation
        self._count = UsageCount([len(ids)], conversation.params.n)
        self._options = options
        self._logprobs = conversation.params.logprobs is not None
        self._as_ids = bool(body.return_tokens_as_token_ids)  # tokens are called by their ids
        self._return_ids = return_ids
        self._weight_version = weight_version if body.return_meta_info else None
        self._about_prompt: dict[
            str, Any
        ] = {}  # fields of the answer, or of each first chunk of a stream
        if return_ids or body.return_prompt_token_ids:
            self._about_prompt["prompt_token_ids"] = list(ids)
        if body.return_prompt_text:  # what the model gets, truncated or not
            self._about_prompt["prompt_text"] = tokenizer.decode(ids, skip_special_tokens=False)
        self._plain = (
            not (self._logprobs or return_ids or options.continuous_usage_stats)
            and conversation.is_plain
        )
        self._opened: set[int] = set()  # choices that have had their first chunk
        chunk = json_bytes(ChatChunk(**header._asdict(), choices=[]))
        self._prefix = (
            b"data: "
            + chunk.removesuffix(b"]}").replace(b"%", b"%%")
            + b'{"index":%d,"delta":{"content":'
        )

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        for delta in deltas:
            self._count.add(delta)
        choices: Any = [written(self._choice(delta)) for delta in deltas]
        answer = ChatCompletion(
            **self._header._asdict(), **self._about_prompt, choices=choices, usage=self._usage()
        )
        answer.prompt_logprobs = self._prompt_logprobs(0)
        return json_bytes(answer)

    def events(self, delta: Delta) -> bytes:
        self._count.add(delta)
        parts = []
        if delta.choice not in self._opened:
            self._opened.add(delta.choice)
            choice = ChatChunkChoice(
                index=delta.choice, delta=ChatDelta(role="assistant", content="")
            )
            opening = self._chunk(choice, **self._about_prompt)
            opening.prompt_logprobs = self._prompt_logprobs(delta.choice)
            parts.append(event(opening))
        if not self._plain:
            parts += [event(chunk) for chunk in self._contents(delta)]
        elif delta.text:
            text = msgspec.json.encode(delta.text)
            parts.append(
                self._prefix % delta.choice
                + text
                + b'},"logprobs":null,"finish_reason":null}]}\n\n'
            )
        if delta.end is not None:
            parts.append(event(self._finish(delta)))
        return b"".join(parts)

    def closing(self) -> bytes:
        if not self._options.include_usage:
            return b""
        chunk = ChatChunk(**self._header._asdict(), choices=[])
        chunk.usage = self._usage()
        return event(chunk)

    def _choice(self, delta: Delta) -> ChatChoice:
        assert delta.end is not None, "a whole answer has ended"
        choice = ChatChoice(
            index=delta.choice,
            message=answer_of(self._conversation.told(delta), self._conversation.call_id_len),
            logprobs=self._logprobs_of(delta),
            finish_reason=self._conversation.finish_reason(delta),
            matched_stop=delta.end.matched,
            stop_reason=delta.end.matched,
            hidden_states=self._hidden_states(delta),
            meta_info=self._meta_info(delta),
        )
        if self._return_ids:
            choice.token_ids = delta.token_ids
        return choice

    def _contents(self, delta: Delta) -> list[ChatChunk]:
        """A chunk for each event. The first has what there is beside the text: ids and logprobs."""
        found = [self._delta(found) for found in self._conversation.told(delta)]
        if not found and delta.token_ids and (self._logprobs or self._return_ids):
            found = [ChatDelta(content="")]
        choices = [ChatChunkChoice(index=delta.choice, delta=one) for one in found]
        if choices:
            choices[0].logprobs = self._logprobs_of(delta)
            if self._return_ids:
                choices[0].token_ids = delta.token_ids
        return [self._chunk(choice) for choice in choices]

    def _delta(self, found: Event | CustomCall) -> ChatDelta:
        match found:
            case AnswerText():
                return ChatDelta(content=found.text)
            case ReasoningText():
                return ChatDelta(reasoning_content=found.text)
            case CallBegin():
                function = FunctionDelta(name=found.name, arguments="")
                id = call_id(self._conversation.call_id_len)
                return ChatDelta(
                    tool_calls=[
                        ToolCallDelta(index=found.call, id=id, type="function", function=function)
                    ]
                )
            case CallArguments():
                function = FunctionDelta(arguments=found.text)
                return ChatDelta(tool_calls=[ToolCallDelta(index=found.call, function=function)])
            case CustomCall():
                custom = CustomInput(found.name, found.input)
                id = call_id(self._conversation.call_id_len)
                return ChatDelta(
                    tool_calls=[
                        ToolCallDelta(index=found.call, id=id, type="custom", custom=custom)
                    ]
                )

    def _finish(self, delta: Delta) -> ChatChunk:
        assert delta.end is not None
        reason = self._conversation.finish_reason(delta)
        choice = ChatChunkChoice(index=delta.choice, delta=ChatDelta(), finish_reason=reason)
        choice.matched_stop = choice.stop_reason = delta.end.matched
        choice.delta.hidden_states = self._hidden_states(delta)
        choice.meta_info = self._meta_info(delta)
        return self._chunk(choice)

    def _chunk(self, choice: ChatChunkChoice, **about: Any) -> ChatChunk:
        chunk = ChatChunk(**self._header._asdict(), **about, choices=[choice])
        if self._options.continuous_usage_stats:
            chunk.usage = self._count.usage()
        return chunk

    def _hidden_states(self, delta: Delta) -> list[float] | msgspec.UnsetType:
        """Of the last token, if they were asked for."""
        return (
            last_state(self._conversation.generation.completions[delta.choice].given)
            or msgspec.UNSET
        )

    def _meta_info(self, delta: Delta) -> dict[str, Any] | msgspec.UnsetType:
        if self._weight_version is None:
            return msgspec.UNSET
        return meta_info(
            self._conversation.generation.completions[delta.choice], delta, self._weight_version()
        )

    def _usage(self) -> Usage:
        usage = self._count.usage()
        if self._conversation.has_reasoning:
            details = reasoning_details(self._tokenizer, self._conversation.outputs)
            usage.completion_tokens_details = details
            usage.reasoning_tokens = details.reasoning_tokens
        return usage

    def _prompt_logprobs(
        self, choice: int
    ) -> list[dict[str, PromptLogprob] | None] | msgspec.UnsetType:
        """As this choice was given them, before its first token."""
        num_top = self._conversation.params.prompt_logprobs
        if num_top is None:
            return msgspec.UNSET
        given = self._conversation.generation.completions[choice].given
        return vllm_logprobs(self._tokenizer, prompt_logprobs(given), num_top)

    def _logprobs_of(self, delta: Delta) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        wanted = self._conversation.params.logprob_token_ids
        return chat_logprobs(self._tokenizer, delta, as_ids=self._as_ids, wanted=wanted)


def answer_of(events: Sequence[Event | CustomCall], call_id_len: int) -> ChatAnswer:
    """The events of a whole completion as a message."""
    text = "".join(found.text for found in events if isinstance(found, AnswerText))
    reasoning = "".join(found.text for found in events if isinstance(found, ReasoningText))
    arguments: dict[int, list[str]] = {}
    for found in events:
        if isinstance(found, CallArguments):
            arguments.setdefault(found.call, []).append(found.text)
    calls: list[ToolCall | CustomToolCall] = []
    for found in events:
        if isinstance(found, CallBegin):
            function = FunctionCall(found.name, "".join(arguments.get(found.call, ())))
            calls.append(ToolCall(id=call_id(call_id_len), function=function))
        elif isinstance(found, CustomCall):
            calls.append(
                CustomToolCall(id=call_id(call_id_len), custom=CustomInput(found.name, found.input))
            )
    answer = ChatAnswer("assistant", text or (None if calls else ""))
    if reasoning:
        answer.reasoning_content = reasoning
    if calls:
        answer.tool_calls = calls
    return answer


def function_calls(answer: ChatAnswer) -> list[ToolCall]:
    """The calls of a message for APIs that have no custom tools."""
    return [call for call in answer.tool_calls or () if isinstance(call, ToolCall)]


def event(chunk: msgspec.Struct) -> bytes:
    return b"data: " + json_bytes(chunk) + b"\n\n"

"""`POST /v1/chat/completions`, and the route that counts the tokens of a chat's prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.client.aux_outputs import last_state, prompt_logprobs
from weft.client.generation import Completion, Delta
from weft.client.requests import unpack_ids
from weft.json_types import JsonObject
from weft.server.body import json_bytes, json_response, read_json, written
from weft.server.chat.answers import (
    UsageCount,
    answer_header,
    chat_logprobs,
    event,
    meta_info,
    reasoning_details,
    vllm_logprobs,
)
from weft.server.chat.conversation import Conversation, chat_prompt, start_chat
from weft.server.chat.custom_tools import CustomCall
from weft.server.chat.models import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    CompletionTokensDetails,
    CustomInput,
    CustomToolCall,
    FunctionCall,
    FunctionDelta,
    InputTokens,
    PromptLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from weft.server.chat.tools import call_id
from weft.server.context import ServerContext
from weft.server.operation import post
from weft.server.requests import StreamOptions
from weft.server.stream import Answer
from weft.text.parsers.events import AnswerText, CallArguments, CallBegin, Event, ReasoningText


async def chat_completions(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, ChatRequest)
    conversation = await start_chat(context, request, body)
    return Answer(conversation.generation, ChatReply(context, body, conversation))


async def input_tokens(context: ServerContext, request: Request) -> ASGIApp:
    """The number of tokens of a chat's prompt."""
    body = await read_json(context, request, ChatRequest)
    ids = body.input_ids
    if ids is None:
        ids = (await chat_prompt(context, body)).ids
    return json_response(InputTokens(len(ids)))


class ChatReply:
    """Chat completions as bytes.

    Chunks of plain text, nearly all chunks, are assembled from prepared parts.
    """

    def __init__(
        self, context: ServerContext, body: ChatRequest, conversation: Conversation
    ) -> None:
        self._client = context.client
        self._tokenizer = context.tokenizer
        rid = conversation.request.rid
        self._header = answer_header(context, "chatcmpl-", rid, body.model, body.lora_path)
        self._conversation = conversation
        request = conversation.request
        ids = unpack_ids(request.input_ids).tolist()
        detailed: Sequence[Completion] = ()
        tells_cause = request.tells_cause_to is not None
        if request.tells_cache or tells_cause or request.pins:
            detailed = conversation.generation.completions
        self._count = UsageCount([len(ids)], conversation.params.n, request.media, detailed)
        options = body.stream_options or StreamOptions()
        self._tells_usage = bool(options.include_usage)
        self._tells_each_usage = self._tells_usage and bool(options.continuous_usage_stats)
        self._logprobs = conversation.params.logprobs is not None
        self._as_ids = bool(body.return_tokens_as_token_ids)  # name tokens by their ids
        self._return_ids = bool(body.return_token_ids)
        self._return_meta_info = bool(body.return_meta_info)
        # Fields of the answer, or of the first chunk of each choice.
        self._prompt_fields: JsonObject = {}
        if body.return_token_ids or body.return_prompt_token_ids:
            self._prompt_fields["prompt_token_ids"] = ids
        if body.return_prompt_text:  # the prompt of the model, after truncation
            text = context.tokenizer.decode(ids, skip_special_tokens=False)
            self._prompt_fields["prompt_text"] = text
        self._opened: set[int] = set()  # choices whose first chunk was sent
        # Start of a chunk of plain text, with %d for the choice; empty if chunks have more than
        # text.
        self._prefix = b""
        self._suffix = b',"usage":null}\n\n' if self._tells_usage else b"}\n\n"
        has_more = self._logprobs or self._return_ids or self._tells_each_usage
        if conversation.is_plain and conversation.generation.stream and not has_more:
            chunk = json_bytes(ChatChunk(**self._header._asdict(), choices=[]))
            head = chunk.removesuffix(b"]}").replace(b"%", b"%%")
            self._prefix = b"data: " + head + b'{"index":%d,"delta":{"content":'

    def full_body(self, deltas: Sequence[Delta]) -> bytes:
        for delta in deltas:
            self._count.add(delta)
        choices: Any = [written(self._choice(delta)) for delta in deltas]
        answer = ChatCompletion(
            **self._header._asdict(),
            **self._prompt_fields,
            choices=choices,
            usage=self._usage(),
        )
        num_top = self._conversation.params.prompt_logprobs
        if num_top is not None:
            answer.prompt_logprobs = self._prompt_logprobs(0, num_top)
        return json_bytes(answer)

    def events(self, delta: Delta) -> bytes:
        self._count.add(delta)
        if self._prefix and delta.end is None and delta.choice in self._opened:
            return self._text(delta)
        parts = []
        if delta.choice not in self._opened:
            self._opened.add(delta.choice)
            parts.append(event(self._opening(delta.choice)))
        if not self._prefix:
            parts += [event(chunk) for chunk in self._contents(delta)]
        else:
            parts.append(self._text(delta))
        if delta.end is not None:
            parts.append(event(self._finish(delta)))
        return b"".join(parts)

    def _text(self, delta: Delta) -> bytes:
        """A chunk of plain text; empty if there is no text."""
        if not delta.text:
            return b""
        text = msgspec.json.encode(delta.text)
        end = b'},"logprobs":null,"finish_reason":null}]'
        return self._prefix % delta.choice + text + end + self._suffix

    def closing(self) -> bytes:
        if not self._tells_usage:
            return b""
        chunk = ChatChunk(**self._header._asdict(), choices=[])
        chunk.usage = self._usage()
        return event(chunk)

    # ---- answers that are not streamed

    def _choice(self, delta: Delta) -> ChatChoice:
        assert delta.end is not None, "a whole answer has ended"
        events = self._conversation.events_and_custom_calls(delta)
        choice = ChatChoice(
            index=delta.choice,
            message=answer_of(events, self._conversation.call_id_len),
            logprobs=self._logprobs_of(delta) if self._logprobs else None,
            finish_reason=self._conversation.finish_reason(delta),
            matched_stop=delta.end.matched,
            stop_reason=delta.end.matched,
        )
        if self._conversation.params.hidden_states is not None:
            choice.hidden_states = self._hidden_states(delta)
        if self._return_meta_info:
            choice.meta_info = self._meta_info(delta)
        if self._return_ids:
            choice.token_ids = delta.token_ids
        return choice

    # ---- chunks of a stream

    def _opening(self, index: int) -> ChatChunk:
        """The first chunk of a choice: a role, and the fields about the prompt."""
        # An empty text would be a part of the answer to some clients.
        delta = ChatDelta(role="assistant", content=None)
        chunk = self._chunk(ChatChunkChoice(index=index, delta=delta), **self._prompt_fields)
        num_top = self._conversation.params.prompt_logprobs
        if num_top is not None:
            chunk.prompt_logprobs = self._prompt_logprobs(index, num_top)
        return chunk

    def _contents(self, delta: Delta) -> list[ChatChunk]:
        """One chunk per event. Only the first has the ids and log probabilities of the delta."""
        events = self._conversation.events_and_custom_calls(delta)
        found = [self._delta(event) for event in events]
        if not found and delta.token_ids and (self._logprobs or self._return_ids):
            found = [ChatDelta()]
        choices = [ChatChunkChoice(index=delta.choice, delta=one) for one in found]
        if choices:
            if self._logprobs:
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
            case CallArguments():
                function = FunctionDelta(arguments=found.text)
                return ChatDelta(tool_calls=[ToolCallDelta(index=found.call, function=function)])
            case CallBegin():
                call = ToolCallDelta(
                    index=found.call,
                    id=call_id(self._conversation.call_id_len),
                    type="function",
                    function=FunctionDelta(name=found.name, arguments=""),
                )
            case CustomCall():
                call = ToolCallDelta(
                    index=found.call,
                    id=call_id(self._conversation.call_id_len),
                    type="custom",
                    custom=CustomInput(found.name, found.input),
                )
        return ChatDelta(tool_calls=[call])

    def _finish(self, delta: Delta) -> ChatChunk:
        assert delta.end is not None
        reason = self._conversation.finish_reason(delta)
        choice = ChatChunkChoice(
            index=delta.choice,
            delta=ChatDelta(),
            finish_reason=reason,
        )
        choice.matched_stop = delta.end.matched
        choice.stop_reason = delta.end.matched
        if self._conversation.params.hidden_states is not None:
            choice.delta.hidden_states = self._hidden_states(delta)
        if self._return_meta_info:
            choice.meta_info = self._meta_info(delta)
        return self._chunk(choice)

    def _chunk(self, choice: ChatChunkChoice, **others: Any) -> ChatChunk:
        chunk = ChatChunk(
            **self._header._asdict(),
            **others,
            choices=[choice],
        )
        if self._tells_each_usage:
            chunk.usage = self._count.usage()
        elif self._tells_usage:
            chunk.usage = None
        return chunk

    # ---- parts of both

    def _hidden_states(self, delta: Delta) -> list[float] | msgspec.UnsetType:
        """The hidden state of the last token; unset if there is none."""
        completion = self._conversation.generation.completions[delta.choice]
        return last_state(completion.aux_outputs) or msgspec.UNSET

    def _meta_info(self, delta: Delta) -> JsonObject:
        completion = self._conversation.generation.completions[delta.choice]
        return meta_info(completion, delta, self._client.state.weight_version)

    def _usage(self) -> Usage:
        count = self._count
        usage = count.usage()
        conversation = self._conversation
        details = CompletionTokensDetails()
        if conversation.has_reasoning:
            details = reasoning_details(self._tokenizer, conversation.outputs)
            usage.reasoning_tokens = details.reasoning_tokens
        if conversation.request.prediction:
            details.accepted_prediction_tokens = count.accepted_prediction_tokens
            details.rejected_prediction_tokens = count.rejected_prediction_tokens
        if conversation.has_reasoning or conversation.request.prediction:
            usage.completion_tokens_details = details
        return usage

    def _prompt_logprobs(self, choice: int, num_top: int) -> list[dict[str, PromptLogprob] | None]:
        """The log probabilities of the prompt, which the engine sends to this choice before its
        first token."""
        completion = self._conversation.generation.completions[choice]
        return vllm_logprobs(self._tokenizer, prompt_logprobs(completion.aux_outputs), num_top)

    def _logprobs_of(self, delta: Delta) -> ChatLogprobs:
        wanted = self._conversation.params.logprob_token_ids
        return chat_logprobs(
            self._tokenizer,
            delta,
            as_ids=self._as_ids,
            wanted=wanted,
        )


def answer_of(events: Sequence[Event | CustomCall], call_id_len: int) -> ChatAnswer:
    """The events of a complete completion as a message."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall | CustomToolCall] = []
    arguments: dict[int, list[str]] = {}  # pieces, by call
    for found in events:
        match found:
            case AnswerText():
                texts.append(found.text)
            case ReasoningText():
                reasoning.append(found.text)
            case CallArguments():
                arguments.setdefault(found.call, []).append(found.text)
    for found in events:
        if isinstance(found, CallBegin):
            function = FunctionCall(found.name, "".join(arguments.get(found.call, ())))
            calls.append(ToolCall(id=call_id(call_id_len), function=function))
        elif isinstance(found, CustomCall):
            custom = CustomInput(found.name, found.input)
            calls.append(CustomToolCall(id=call_id(call_id_len), custom=custom))
    text = "".join(texts)
    answer = ChatAnswer("assistant", text)
    if calls and not text:
        answer.content = None
    if any(reasoning):
        answer.reasoning_content = "".join(reasoning)
    if calls:
        answer.tool_calls = calls
    return answer


def function_calls(answer: ChatAnswer) -> list[ToolCall]:
    """The function calls of a message, for APIs without custom tools."""
    return [call for call in answer.tool_calls or () if isinstance(call, ToolCall)]


ROUTES = (
    post(
        "/v1/chat/completions",
        chat_completions,
        "Continue a conversation",
        ChatRequest,
        answer=ChatCompletion,
    ),
    post(
        "/v1/chat/completions/input_tokens",
        input_tokens,
        "Count the tokens of a conversation",
        ChatRequest,
        answer=InputTokens,
    ),
)

"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.messages.sampling import InvalidParam
from weft.server.body import json_bytes, read_json
from weft.server.errors import ApiError, not_supported
from weft.server.info import Front
from weft.server.limits import MAX_CHAT_LOGPROBS, MAX_MESSAGES, MAX_TOOLS
from weft.server.openai.models import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    StreamOptions,
)
from weft.server.openai.translate import (
    Header,
    UsageCount,
    chat_logprobs,
    encode_texts,
    header,
    prompts,
    sampling_params,
    submit,
)
from weft.server.stream import Answer
from weft.text.generation import Delta
from weft.text.tokenizer import Tokenizer


async def chat_completions(front: Front, request: Request) -> ASGIApp:
    body = await read_json(front, request, ChatRequest)
    front.require_model(body.model)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = sampling_params(body, max_new_tokens=max_tokens, logprobs=_num_logprobs(body))
    params.check(front.client.engine.vocab_size)  # before the work of rendering
    try:
        ids = body.input_ids if body.input_ids is not None else await chat_prompt(front, body)
        [prompt] = prompts(front, request, body, [ids], params)
        generation = submit(front, [prompt], stream=bool(body.stream))
    except InvalidParam as exc:
        if exc.param == "prompt":  # as text and client call it
            exc.param = "messages" if body.input_ids is None else "input_ids"
        raise
    reply = ChatReply(
        front.tokenizer,
        header(front, "chatcmpl", prompt.rid),
        count=UsageCount([len(ids)], params.n),
        options=body.stream_options or StreamOptions(),
        logprobs=params.logprobs is not None,
        prompt_ids=list(ids) if body.return_token_ids else None,
    )
    return Answer(generation, reply)


async def chat_prompt(front: Front, body: ChatRequest) -> list[int]:
    """The conversation as token ids, by the model's template."""
    if front.template is None:
        raise ApiError(400, "this model has no chat template; use /v1/completions, or give one with --chat-template")
    if not 0 < len(body.messages) <= MAX_MESSAGES:
        raise ApiError(
            400, f"there are {len(body.messages):,} messages; 1 to {MAX_MESSAGES:,} are allowed", param="messages"
        )
    _check_tools(body)
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        raise ApiError(
            400, "add_generation_prompt and continue_final_message exclude each other", param="continue_final_message"
        )
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    text = await front.template.render_async(
        msgspec.to_builtins(body.messages),
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=continued,
        kwargs=kwargs,
    )
    [ids] = await encode_texts(front, [text], add_special_tokens=bool(body.add_special_tokens))
    return ids


def _check_tools(body: ChatRequest) -> None:
    """The template may show tools to the model, but nothing parses their calls or forces them yet."""
    if body.tool_choice not in (None, "none", "auto"):
        raise not_supported("tool_choice")
    if body.tools and body.tool_choice != "none":
        raise not_supported("tools")
    if body.tools and len(body.tools) > MAX_TOOLS:
        raise ApiError(400, f"{len(body.tools):,} tools; at most {MAX_TOOLS:,} are allowed", param="tools")


def _num_logprobs(body: ChatRequest) -> int | None:
    top = body.top_logprobs or 0
    if not 0 <= top <= MAX_CHAT_LOGPROBS:
        raise ApiError(400, f"top_logprobs is {top}; 0 to {MAX_CHAT_LOGPROBS} are allowed", param="top_logprobs")
    if top and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    return top if body.logprobs else None


class ChatReply:
    """Chat completions as bytes. Chunks of plain text, which are nearly all, are put together from prepared parts."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        header: Header,
        *,
        count: UsageCount,
        options: StreamOptions,
        logprobs: bool,
        prompt_ids: list[int] | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._header = header
        self._count = count
        self._options = options
        self._logprobs = logprobs
        self._prompt_ids = prompt_ids  # given if ids are to be returned
        self._plain = not (logprobs or prompt_ids is not None or options.continuous_usage_stats)
        self._opened: set[int] = set()  # choices that have had their first chunk
        chunk = json_bytes(ChatChunk(**header._asdict(), choices=[]))
        self._prefix = b"data: " + chunk.removesuffix(b"]}").replace(b"%", b"%%") + b'{"index":%d,"delta":{"content":'

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        for delta in deltas:
            self._count.add(delta)
        choices = [self._choice(delta) for delta in deltas]
        answer = ChatCompletion(**self._header._asdict(), choices=choices, usage=self._count.usage())
        if self._prompt_ids is not None:
            answer.prompt_token_ids = self._prompt_ids
        return json_bytes(answer)

    def events(self, delta: Delta) -> bytes:
        self._count.add(delta)
        parts = []
        if delta.choice not in self._opened:
            self._opened.add(delta.choice)
            opening = self._chunk(ChatChunkChoice(index=delta.choice, delta=ChatDelta(role="assistant", content="")))
            if self._prompt_ids is not None:
                opening.prompt_token_ids = self._prompt_ids
            parts.append(event(opening))
        if self._plain and delta.text:
            text = msgspec.json.encode(delta.text)
            parts.append(self._prefix % delta.choice + text + b'},"logprobs":null,"finish_reason":null}]}\n\n')
        elif delta.text or (not self._plain and delta.token_ids):
            parts.append(event(self._content(delta)))
        if delta.end is not None:
            parts.append(event(self._finish(delta)))
        return b"".join(parts)

    def closing(self) -> bytes:
        if not self._options.include_usage:
            return b""
        chunk = ChatChunk(**self._header._asdict(), choices=[])
        chunk.usage = self._count.usage()
        return event(chunk)

    def _choice(self, delta: Delta) -> ChatChoice:
        assert delta.end is not None, "a whole answer has ended"
        choice = ChatChoice(
            index=delta.choice,
            message=ChatAnswer("assistant", delta.text),
            logprobs=self._logprobs_of(delta),
            finish_reason=delta.end.reason,
            matched_stop=delta.end.matched,
            stop_reason=delta.end.matched,
        )
        if self._prompt_ids is not None:
            choice.token_ids = delta.token_ids
        return choice

    def _content(self, delta: Delta) -> ChatChunk:
        choice = ChatChunkChoice(
            index=delta.choice, delta=ChatDelta(content=delta.text), logprobs=self._logprobs_of(delta)
        )
        if self._prompt_ids is not None:
            choice.token_ids = delta.token_ids
        return self._chunk(choice)

    def _finish(self, delta: Delta) -> ChatChunk:
        assert delta.end is not None
        choice = ChatChunkChoice(index=delta.choice, delta=ChatDelta(), finish_reason=delta.end.reason)
        choice.matched_stop = choice.stop_reason = delta.end.matched
        return self._chunk(choice)

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        chunk = ChatChunk(**self._header._asdict(), choices=[choice])
        if self._options.continuous_usage_stats:
            chunk.usage = self._count.usage()
        return chunk

    def _logprobs_of(self, delta: Delta) -> ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, delta) if self._logprobs else None


def event(chunk: msgspec.Struct) -> bytes:
    return b"data: " + json_bytes(chunk) + b"\n\n"

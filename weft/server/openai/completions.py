"""`POST /v1/completions`: text or token ids, one prompt or a list of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.client.aux_outputs import last_state, prompt_logprobs
from weft.client.generation import Completion, Delta, Generation, TextDelivery
from weft.messages.sampling import SamplingParams
from weft.server.body import json_bytes, read_json, written
from weft.server.chat.answers import (
    AnswerHeader,
    TextOffsets,
    TokenName,
    UsageCount,
    answer_header,
    completion_logprobs,
    echoed_logprobs,
    event,
    joined_logprobs,
    token_names,
    vllm_logprobs,
)
from weft.server.chat.models import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    TextCompletion,
)
from weft.server.context import ServerContext
from weft.server.errors import ApiError, not_supported
from weft.server.infill import infill_prompt, infill_tokens, with_stops
from weft.server.operation import post
from weft.server.prompt_ids import truncation
from weft.server.requests import StreamOptions, make_requests, sampling_of, submit
from weft.server.stream import Answer
from weft.text.tokenizer import ContextExceeded, Tokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, CompletionRequest)
    params = _sampling(context, body)
    params.check(context.client.engine.vocab_size)  # before the work on the prompts
    valid = params
    cut = None
    if body.truncate_prompt_tokens is not None or context.config.auto_truncate:
        cut = truncation(context, body.truncate_prompt_tokens, body.truncation_side)
    context_len = None if cut is not None else context.info.context_length
    texts = split_prompt(body.prompt, context_len)
    if body.suffix:
        cut = None
        params, ids = await _infilled(context, body, texts, params)
    else:
        special = body.add_special_tokens is not False
        ids = await context.tokenizer.encode_prompts(
            texts, add_special_tokens=special, context_len=context_len
        )
    if cut is not None:
        max_new = params.max_new_tokens
        ids = [cut.cut(own_ids, context.info.context_length, max_new) for own_ids in ids]
        texts = [*ids]
    requests = make_requests(context, request, body, ids, params)
    delivery = TextDelivery(body.stream_interval or context.config.stream_interval)
    deliveries = [delivery] * len(requests)
    generation = submit(context, requests, deliveries, stream=bool(body.stream), valid=valid)
    echo = await _echo(context, body, texts) if body.echo else None
    reply = CompletionReply(
        context,
        body,
        params,
        generation,
        ids,
        echo,
    )
    return Answer(generation, reply)


def _sampling(context: ServerContext, body: CompletionRequest) -> SamplingParams:
    """The sampling parameters. Raises `ApiError` or `InvalidParam` for invalid fields and
    combinations."""
    num_of_prompt = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        num_of_prompt = max(body.logprobs, num_of_prompt or 0)
    # A request that only asks for its prompt, or for the log probabilities of its prompt, may
    # generate no token.
    fewest_tokens = 0 if body.echo or num_of_prompt is not None else 1
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = sampling_of(
        body,
        context.info.sampling,
        max_new_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=num_of_prompt,
        fewest_tokens=fewest_tokens,
    )
    if body.best_of is not None and body.best_of != params.n:
        message = f"best_of is {body.best_of}; only the value of n is supported"
        raise ApiError(400, message, param="best_of")
    if body.echo and body.logprobs is not None and body.session_params is not None:
        raise not_supported("log probabilities of an echoed prompt after the history of a session")
    return params


def split_prompt(
    prompt: str | list[str | int | list[int]], context_len: int | None
) -> list[str | list[int]]:
    """A prompt field as a list of prompts. The field is a text, ids, or a list of either.

    `context_len`: ids that are more than this are refused; None: they will be cut.
    """
    if isinstance(prompt, str):
        return [prompt]
    is_one = bool(prompt) and isinstance(prompt[0], int)
    if is_one and context_len is not None and len(prompt) > context_len:
        message = (
            f"the prompt has {len(prompt):,} tokens, "
            f"more than the context of {context_len:,} tokens"
        )
        raise ContextExceeded("prompt", message)
    if set(map(type, prompt)) == {int}:
        return [cast(list[int], prompt)]
    found = [item for item in prompt if not isinstance(item, int)]
    if len(found) < len(prompt):
        raise ApiError(400, "the prompt mixes token ids with texts or lists", param="prompt")
    if not found:
        raise ApiError(400, "prompt is empty; at least one prompt is needed", param="prompt")
    return found


async def _infilled(
    context: ServerContext,
    body: CompletionRequest,
    texts: Sequence[str | list[int]],
    params: SamplingParams,
) -> tuple[SamplingParams, list[list[int]]]:
    """Parameters and prompts for filling the gaps between each of `texts` and the suffix. Raises
    `ApiError`."""
    tokens = infill_tokens(context, "suffix")
    if body.truncate_prompt_tokens is not None:
        raise not_supported("truncate_prompt_tokens together with suffix")
    if body.echo and body.logprobs is not None:
        raise not_supported("log probabilities of an echoed prompt together with suffix")
    special = body.add_special_tokens is not False
    suffix = body.suffix or ""
    ids = [
        await infill_prompt(context, tokens, text, suffix, add_special_tokens=special)
        for text in texts
    ]
    return with_stops(context, tokens, params), ids


class EchoSpec(NamedTuple):
    """The prompts that precede their completions in the answer."""

    texts: list[str]  # one per prompt
    num_logprobs: int | None  # likeliest tokens per token of the prompt; None: not requested


async def _echo(
    context: ServerContext, body: CompletionRequest, prompts: Sequence[str | list[int]]
) -> EchoSpec:
    texts = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            prompt = await context.tokenizer.decode_prompt(prompt)
        texts.append(prompt)
    return EchoSpec(texts, body.logprobs)


class LogprobsSpec(NamedTuple):
    """The requested log probabilities of a completion, and their form."""

    name_of: TokenName
    wanted: Sequence[int]  # tokens in addition to the likeliest
    skip_special_tokens: bool  # for the offsets of tokens in the text


class CompletionReply:
    """Text completions as bytes. Chunks of plain text are assembled from prepared parts."""

    def __init__(
        self,
        context: ServerContext,
        body: CompletionRequest,
        params: SamplingParams,
        generation: Generation,
        prompt_ids: list[list[int]],
        echo: EchoSpec | None,
    ) -> None:
        self._tokenizer: Tokenizer = context.tokenizer
        self._generation = generation
        self._header: AnswerHeader = answer_header(
            context, "cmpl-", generation.completions[0].spec.request.rid, body.model, body.lora_path
        )
        self._n = params.n
        self._prompt_ids = prompt_ids
        self._echo = echo
        options = body.stream_options or StreamOptions()
        self._tells_usage = bool(options.include_usage)
        self._tells_each_usage = self._tells_usage and bool(options.continuous_usage_stats)
        self._return_ids = bool(body.return_token_ids)
        self._tells_prompt = bool(body.echo or body.return_token_ids) or (
            body.prompt_logprobs is not None
        )
        # Likeliest tokens per token of the prompt; None: not requested.
        self._num_prompt_logprobs = body.prompt_logprobs
        self._logprobs: LogprobsSpec | None = None
        if params.logprobs is not None:
            self._logprobs = LogprobsSpec(
                token_names(context.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)),
                params.logprob_token_ids,
                params.skip_special_tokens,
            )
        detailed: Sequence[Completion] = ()
        if body.return_cached_tokens_details or body.return_cache_cause:
            detailed = generation.completions
        self._count = UsageCount(list(map(len, prompt_ids)), params.n, detailed=detailed)
        self._opened: set[int] = set()  # choices whose first chunk was sent
        self._offsets: dict[int, TextOffsets] = {}  # by choice, if log probabilities are requested
        self._prefix = b""  # start of a chunk of plain text; empty if chunks have more
        is_plain = not (self._return_ids or self._tells_each_usage)
        if generation.stream and is_plain and self._logprobs is None:
            self._prefix = _plain_prefix(self._header)
        self._suffix = b',"usage":null}\n\n' if self._tells_usage else b"}\n\n"

    def full_body(self, deltas: Sequence[Delta]) -> bytes:
        choices: list[Any] = [written(self._choice(delta)) for delta in deltas]
        answer = TextCompletion(**self._header._asdict(), choices=choices)
        answer.usage = self._count.usage()
        return json_bytes(answer)

    def events(self, delta: Delta) -> bytes:
        if self._prefix and delta.end is None and delta.choice in self._opened:
            self._count.add(delta)
            text = msgspec.json.encode(delta.text)
            end = b',"logprobs":null,"finish_reason":null}]'
            return self._prefix % delta.choice + text + end + self._suffix
        chunk = TextCompletion(
            **self._header._asdict(),
            choices=[self._choice(delta)],
        )
        if self._tells_each_usage:
            chunk.usage = self._count.usage()
        elif self._tells_usage:
            chunk.usage = None
        return event(chunk)

    def closing(self) -> bytes:
        if not self._tells_usage:
            return b""
        usage = self._count.usage()
        return event(
            TextCompletion(
                **self._header._asdict(),
                choices=[],
                usage=usage,
            )
        )

    def _choice(self, delta: Delta) -> CompletionChoice:
        self._count.add(delta)
        choice = CompletionChoice(index=delta.choice, text=delta.text)
        if delta.choice not in self._opened:
            self._opened.add(delta.choice)
            if self._tells_prompt:
                self._open(choice)
        if self._logprobs is not None:
            choice.logprobs = self._logprobs_of(delta, self._logprobs)
        if self._return_ids:
            choice.token_ids = delta.token_ids
        if delta.end is not None:
            choice.finish_reason = delta.end.reason
            choice.matched_stop = delta.end.matched
            choice.stop_reason = delta.end.matched
            completion = self._generation.completions[delta.choice]
            if completion.spec.request.sampling.hidden_states is not None:
                choice.hidden_states = last_state(completion.aux_outputs) or msgspec.UNSET
        return choice

    def _open(self, choice: CompletionChoice) -> None:
        """Add the fields about the prompt, which only the first chunk of a choice has."""
        prompt = choice.index // self._n
        if self._echo is not None:
            choice.text = self._echo.texts[prompt] + choice.text
        if self._num_prompt_logprobs is not None:
            tokens = prompt_logprobs(self._generation.completions[choice.index].aux_outputs)
            choice.prompt_logprobs = vllm_logprobs(
                self._tokenizer, tokens, self._num_prompt_logprobs
            )
        if self._return_ids:
            choice.prompt_token_ids = self._prompt_ids[prompt]

    def _logprobs_of(self, delta: Delta, spec: LogprobsSpec) -> CompletionLogprobs:
        """The log probabilities of a delta; if the prompt is echoed, after those of the prompt.

        Offsets count in the text that includes the prompt.
        """
        offsets = self._offsets.get(delta.choice)
        if offsets is not None:
            return completion_logprobs(delta, offsets, spec.name_of, spec.wanted)
        prompt = delta.choice // self._n
        detokenizer = self._tokenizer.detokenizer(
            skip_special_tokens=spec.skip_special_tokens, prompt=self._prompt_ids[prompt]
        )
        echo = self._echo
        offsets = TextOffsets(detokenizer, 0 if echo is None else len(echo.texts[prompt]))
        self._offsets[delta.choice] = offsets
        found = completion_logprobs(delta, offsets, spec.name_of, spec.wanted)
        if echo is None or echo.num_logprobs is None:
            return found
        tokens = prompt_logprobs(self._generation.completions[delta.choice].aux_outputs)
        echoed = echoed_logprobs(self._tokenizer, tokens, echo.num_logprobs, spec.name_of)
        return joined_logprobs(echoed, found)


def _plain_prefix(header: AnswerHeader) -> bytes:
    """A chunk up to its text, with %d for the index of the choice."""
    chunk = json_bytes(TextCompletion(**header._asdict(), choices=[]))
    head = chunk.removesuffix(b"]}").replace(b"%", b"%%")
    return b"data: " + head + b'{"index":%d,"text":'


ROUTES = (
    post(
        "/v1/completions",
        completions,
        "Continue texts or token ids",
        CompletionRequest,
        answer=TextCompletion,
    ),
)

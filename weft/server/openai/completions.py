"""`POST /v1/completions`: text or token ids, one prompt or a list of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.client.aux_outputs import last_state, prompt_logprobs
from weft.client.generation import Delta
from weft.messages.replies import Extra
from weft.messages.sampling import SamplingParams
from weft.server.body import json_bytes, read_json, written
from weft.server.context import ServerContext
from weft.server.errors import ApiError, not_supported
from weft.server.fields.truncation import truncation
from weft.server.infill import infill_prompt, infill_tokens, with_stops
from weft.server.openai.chat import event
from weft.server.openai.models import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    StreamOptions,
    TextCompletion,
)
from weft.server.openai.prompt_logprobs import echoed_logprobs, joined, vllm_logprobs
from weft.server.openai.translate import (
    Header,
    Places,
    TokenName,
    UsageCount,
    completion_logprobs,
    encode_mixed,
    header,
    prompts,
    sampling_params,
    submit,
    token_names,
)
from weft.server.stream import Answer
from weft.text.tokenizer import ContextExceeded, Tokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, CompletionRequest)
    context.require_model(body.model)
    num_echoed = body.logprobs if body.echo else None
    told = [num for num in (num_echoed, body.prompt_logprobs) if num is not None]
    params = sampling_params(
        body,
        context.info.sampling,
        max_new_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=max(told, default=None),
        fewest_tokens=0 if body.echo or told else 1,
    )
    if body.best_of is not None and body.best_of != params.n:
        raise ApiError(
            400, f"best_of is {body.best_of}; only the value of n is supported", param="best_of"
        )
    if num_echoed is not None and body.session_params is not None:
        raise not_supported("log probabilities of an echoed prompt behind the history of a session")
    params.check(context.client.engine.vocab_size)
    cut, special = (
        truncation(body, auto=context.config.auto_truncate),
        body.add_special_tokens is not False,
    )
    texts = split_prompt(body.prompt, sys.maxsize if cut else context.info.context_length)
    if body.suffix:
        cut = None
        params, ids = await _infilled(context, body, texts, params)
    else:
        ids = await encode_mixed(
            context, texts, add_special_tokens=special, truncates=cut is not None
        )
    if cut is not None:
        ids = [cut(one, context.info.context_length, params.max_new_tokens) for one in ids]
    generation = submit(
        context, prompts(context, request, body, ids, params), stream=bool(body.stream)
    )
    reply = CompletionReply(
        context.tokenizer,
        header(context, "cmpl-", generation.completions[0].rid),
        n=params.n,
        prompt_ids=ids,
        echo=await _echoes(context, body, ids if cut else texts),
        options=body.stream_options or StreamOptions(),
        logprobs=params.logprobs is not None,
        name_of=token_names(context.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)),
        return_ids=bool(body.return_token_ids),
        given=[completion.given for completion in generation.completions],
        num_echoed=num_echoed,
        num_told=body.prompt_logprobs,
        wanted=params.logprob_token_ids,
        skip_special_tokens=params.skip_special_tokens,
    )
    return Answer(generation, reply)


def split_prompt(
    prompt: str | list[str | int | list[int]], context_len: int
) -> list[str | list[int]]:
    """A prompt field as the list of prompts it stands for: text, ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int) and len(prompt) > context_len:
        raise ContextExceeded(
            "prompt",
            f"the prompt has {len(prompt):,} tokens, more than the context of {context_len:,} tokens",
        )
    if set(map(type, prompt)) == {int}:
        return [cast(list[int], prompt)]
    found = [item for item in prompt if not isinstance(item, int)]
    if len(found) < len(prompt):
        raise ApiError(400, "the prompt mixes token ids with texts or lists", param="prompt")
    if not found:
        raise ApiError(400, "there is no prompt", param="prompt")
    return found


async def _infilled(
    context: ServerContext,
    body: CompletionRequest,
    texts: Sequence[str | list[int]],
    params: SamplingParams,
) -> tuple[SamplingParams, list[list[int]]]:
    """Parameters and prompts of gaps between each of `texts` and the suffix. Raises `ApiError`."""
    tokens = infill_tokens(context, "suffix")
    if body.truncate_prompt_tokens is not None:
        raise not_supported("truncate_prompt_tokens together with suffix")
    if body.echo and body.logprobs is not None:
        raise not_supported("log probabilities of an echoed prompt together with suffix")
    special = body.add_special_tokens is not False
    ids = [
        await infill_prompt(context, tokens, text, body.suffix or "", add_special_tokens=special)
        for text in texts
    ]
    return with_stops(context, tokens, params), ids


async def _echoes(
    context: ServerContext, body: CompletionRequest, texts: Sequence[str | list[int]]
) -> list[str]:
    """What stands before each completion: the prompt's text if asked for."""
    if not body.echo:
        return [""] * len(texts)
    return [
        text if isinstance(text, str) else await context.tokenizer.decode_prompt(text)
        for text in texts
    ]


class CompletionReply:
    """Text completions as bytes. Chunks of plain text are put together from prepared parts."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        header: Header,
        *,
        n: int,
        prompt_ids: Sequence[list[int]],
        echo: Sequence[str],
        options: StreamOptions,
        logprobs: bool,
        name_of: TokenName,
        return_ids: bool,
        given: Sequence[Sequence[Extra]],
        num_echoed: int | None,
        num_told: int | None,
        wanted: Sequence[int],
        skip_special_tokens: bool,
    ) -> None:
        """`given` is by choice; its log probabilities of the prompt are there before the first delta. `num_echoed` and
        `num_told` are the likeliest tokens that `echo` and `prompt_logprobs` tell beside each; None: not asked for."""
        self._tokenizer = tokenizer
        self._header = header
        self._n = n
        self._prompt_ids = prompt_ids
        self._echo = echo
        self._options = options
        self._logprobs = logprobs
        self._name_of = name_of
        self._return_ids = return_ids
        self._given = given
        self._num_echoed = num_echoed
        self._num_told = num_told
        self._wanted = wanted  # tokens that are told beside the likeliest
        self._skip_special_tokens = skip_special_tokens
        self._count = UsageCount([len(ids) for ids in prompt_ids], n)
        self._plain = not (logprobs or return_ids or options.continuous_usage_stats)
        self._opened: set[int] = set()  # choices that have had their first chunk
        self._places: dict[int, Places] = {}  # by choice, where log probabilities are told
        chunk = json_bytes(TextCompletion(**header._asdict(), choices=[]))
        self._prefix = (
            b"data: " + chunk.removesuffix(b"]}").replace(b"%", b"%%") + b'{"index":%d,"text":'
        )

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        choices: Any = [written(self._choice(delta)) for delta in deltas]
        answer = TextCompletion(**self._header._asdict(), choices=choices)
        answer.usage = self._count.usage()
        return json_bytes(answer)

    def events(self, delta: Delta) -> bytes:
        if self._plain and delta.end is None and delta.choice in self._opened:
            self._count.add(delta)
            text = msgspec.json.encode(delta.text)
            return (
                self._prefix % delta.choice + text + b',"logprobs":null,"finish_reason":null}]}\n\n'
            )
        chunk = TextCompletion(**self._header._asdict(), choices=[self._choice(delta)])
        if self._options.continuous_usage_stats:
            chunk.usage = self._count.usage()
        return event(chunk)

    def closing(self) -> bytes:
        if not self._options.include_usage:
            return b""
        return event(
            TextCompletion(**self._header._asdict(), choices=[], usage=self._count.usage())
        )

    def _choice(self, delta: Delta) -> CompletionChoice:
        self._count.add(delta)
        prompt = delta.choice // self._n
        first = delta.choice not in self._opened
        text = self._echo[prompt] + delta.text if first else delta.text
        choice = CompletionChoice(index=delta.choice, text=text, logprobs=self._logprobs_of(delta))
        if first and self._num_told is not None:
            tokens = prompt_logprobs(self._given[delta.choice])
            choice.prompt_logprobs = vllm_logprobs(self._tokenizer, tokens, self._num_told)
        self._opened.add(delta.choice)
        if self._return_ids:
            choice.token_ids = delta.token_ids
            if first:
                choice.prompt_token_ids = self._prompt_ids[prompt]
        if delta.end is not None:
            choice.finish_reason = delta.end.reason
            choice.matched_stop = choice.stop_reason = delta.end.matched
            choice.hidden_states = last_state(self._given[delta.choice]) or msgspec.UNSET
        return choice

    def _logprobs_of(self, delta: Delta) -> CompletionLogprobs | None:
        """With those of the prompt before them, where it is echoed. Offsets count in the text with the prompt."""
        if not self._logprobs:
            return None
        places = self._places.get(delta.choice)
        if places is not None:
            return completion_logprobs(delta, places, self._name_of, self._wanted)
        places = self._places[delta.choice] = self._first_place(delta.choice // self._n)
        found = completion_logprobs(delta, places, self._name_of, self._wanted)
        if self._num_echoed is None:
            return found
        tokens = prompt_logprobs(self._given[delta.choice])
        return joined(
            echoed_logprobs(self._tokenizer, tokens, self._num_echoed, self._name_of), found
        )

    def _first_place(self, prompt: int) -> Places:
        ids = self._prompt_ids[prompt]
        detokenizer = self._tokenizer.detokenizer(
            skip_special_tokens=self._skip_special_tokens, prompt=ids
        )
        return Places(detokenizer, len(self._echo[prompt]))

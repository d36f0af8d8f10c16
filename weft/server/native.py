"""`/generate`, with SGLang's fields and answers: text or ids, one or a batch, streams that repeat the whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.messages.replies import TokenLogprobs
from weft.messages.sampling import SamplingParams
from weft.server.body import json_bytes, read_json
from weft.server.errors import ApiError, not_supported
from weft.server.grammar import grammar_of
from weft.server.info import Front
from weft.server.openai.translate import (
    LOWEST_LOGPROB,
    cache_salt,
    encode_mixed,
    logit_bias,
    request_name,
    stop_strings,
    submit,
    timeout_ms,
)
from weft.server.sessions import SessionFields, session_params
from weft.server.stream import Answer
from weft.text.generation import Delta, End, Prompt
from weft.text.tokenizer import Tokenizer


class NativeSampling(msgspec.Struct, kw_only=True):
    """`sampling_params` of SGLang. Those of the second block are refused unless they ask for nothing."""

    max_new_tokens: int | None = 128
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None
    seed: int | None = None

    json_schema: Any = None  # this and the next: what the answer must be (`server/grammar.py`)
    regex: str | None = None
    ebnf: str | None = None
    choice: list[str] | None = None
    structural_tag: Any = None
    structured_outputs: dict[str, Any] | None = None

    stop_regex: Any = None
    beam_width: Any = None
    custom_params: Any = None


_REFUSED = ("stop_regex", "beam_width", "custom_params")
_PASSED = (
    *("n", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "ignore_eos", "skip_special_tokens"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)


class GenerateBody(msgspec.Struct, kw_only=True):
    """Either `text` or `input_ids`. A list of either is a batch, and is answered by a list."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    priority: int | None = None
    timeout_ms: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    session_params: SessionFields | list[SessionFields] | None = None
    model: str | None = None


async def generate(front: Front, request: Request) -> ASGIApp:
    body = await read_json(front, request, GenerateBody)
    front.require_model(body.model)
    sources, is_batch = _sources(body)
    sampling = _spread("sampling_params", body.sampling_params or NativeSampling(), len(sources))
    with_logprobs = _spread("return_logprob", body.return_logprob or False, len(sources))
    top = _spread("top_logprobs_num", body.top_logprobs_num or 0, len(sources))
    _refuse_prompt_logprobs(body)
    params = [_params(*fields) for fields in zip(sampling, with_logprobs, top, strict=True)]
    for one in params:
        one.check(front.client.engine.vocab_size)
    rids = _rids(request, body.rid, len(sources))
    fields = _spread("session_params", body.session_params, len(sources))
    sessions = [session_params(front, own, n=one.n) for own, one in zip(fields, params, strict=True)]
    salt = cache_salt(body.cache_salt, body.extra_key)
    ids = await encode_mixed(front, sources, add_special_tokens=True)
    prompts = [
        Prompt(
            ids=one_ids,
            params=one,
            rid=rid,
            group=body.rid if isinstance(body.rid, str) else "",
            priority=body.priority or 0,
            cache_salt=salt,
            timeout_ms=timeout_ms(front, request, body.timeout_ms),
            session=session,
        )
        for one_ids, one, rid, session in zip(ids, params, rids, sessions, strict=True)
    ]
    generation = submit(front, prompts, stream=bool(body.stream))
    reply = NativeReply(
        front.tokenizer,
        rids=[completion.rid for completion in generation.completions],
        prompt_lens=[completion.prompt_len for completion in generation.completions],
        as_list=is_batch or len(generation.completions) > 1,
        logprobs=[bool(one.logprobs is not None) for one in params for _ in range(one.n)],
        with_text=bool(body.return_text_in_logprobs),
        version=lambda: front.client.weight_version,
    )
    return Answer(generation, reply)


def _sources(body: GenerateBody) -> tuple[Sequence[str | list[int]], bool]:
    """The prompts, and whether they are a batch."""
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "give either text or input_ids", param="text")
    if isinstance(body.text, str):
        return [body.text], False
    if body.text is None:
        ids = [item for item in body.input_ids or [] if isinstance(item, int)]
        lists = [item for item in body.input_ids or [] if not isinstance(item, int)]
        if ids and lists:
            raise ApiError(400, "input_ids mixes token ids with lists", param="input_ids")
        if not lists:
            return [ids], False
    batch = body.text if body.text is not None else lists
    if not batch:
        raise ApiError(400, "there is no prompt", param="text")
    return batch, True


def _spread(name: str, value: Any, count: int) -> list[Any]:
    """One value for each prompt: the same for all, or given as a list."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ApiError(400, f"{name} has {len(value):,} entries for {count:,} prompts", param=name)
    return value


def _refuse_prompt_logprobs(body: GenerateBody) -> None:
    starts = body.logprob_start_len if isinstance(body.logprob_start_len, list) else [body.logprob_start_len]
    if body.return_logprob and any(start is not None and start >= 0 for start in starts):
        raise not_supported("logprob_start_len")


def _params(body: NativeSampling, with_logprobs: bool, top: int) -> SamplingParams:
    for name in _REFUSED:
        if getattr(body, name):
            raise not_supported(f"sampling_params.{name}")
    given = {name: getattr(body, name) for name in _PASSED if getattr(body, name) is not None}
    return SamplingParams(
        **given,
        max_new_tokens=body.max_new_tokens,
        logit_bias=logit_bias(body.logit_bias),
        stop=stop_strings(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop=bool(body.no_stop_trim),
        seed=body.sampling_seed if body.sampling_seed is not None else body.seed,
        logprobs=top if with_logprobs else None,
        grammar=grammar_of(body),
    )


def _rids(request: Request, rid: str | list[str] | None, count: int) -> list[str]:
    if isinstance(rid, list):
        return [request_name(request, name) for name in _spread("rid", rid, count)]
    name = request_name(request, rid)
    return [name] if count == 1 else [f"{name}-{number}" for number in range(count)]


class NativeReply:
    """Answers of SGLang's form. Each event of a stream repeats everything that came before."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        rids: Sequence[str],
        prompt_lens: Sequence[int],
        as_list: bool,
        logprobs: Sequence[bool],
        with_text: bool,
        version: Callable[[], str],
    ) -> None:
        self._tokenizer = tokenizer
        self._rids = rids
        self._prompt_lens = prompt_lens
        self._as_list = as_list
        self._with_text = with_text
        self._version = version  # of the weights that compute now
        self._texts = [""] * len(rids)
        self._ids: list[list[int]] = [[] for _ in rids]
        self._logprobs: list[list[TokenLogprobs] | None] = [[] if wanted else None for wanted in logprobs]

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        answers = [self._answer(delta) for delta in deltas]
        return json_bytes(answers if self._as_list else answers[0])

    def events(self, delta: Delta) -> bytes:
        answer = self._answer(delta)
        if self._as_list:
            answer["index"] = delta.choice
        return b"data: " + json_bytes(answer) + b"\n\n"

    def closing(self) -> bytes:
        return b""

    def _answer(self, delta: Delta) -> dict[str, Any]:
        choice = delta.choice
        self._texts[choice] += delta.text
        self._ids[choice] += delta.token_ids
        meta: dict[str, Any] = {
            "id": self._rids[choice],
            "finish_reason": None if delta.end is None else _finish_reason(delta.end),
            "prompt_tokens": self._prompt_lens[choice] if delta.end is None else delta.end.prompt_tokens,
            "completion_tokens": delta.num_tokens,
            "cached_tokens": 0 if delta.end is None else delta.end.cached_tokens,
            "weight_version": self._version() if delta.end is None else delta.end.weight_version,
        }
        if delta.end is not None:
            meta["e2e_latency"] = delta.end.e2e_s
        logprobs = self._logprobs[choice]
        if logprobs is not None:
            logprobs += delta.logprobs
            meta |= self._logprob_lists(self._ids[choice], logprobs)
        return {"text": self._texts[choice], "output_ids": self._ids[choice], "meta_info": meta}

    def _logprob_lists(self, ids: list[int], found: list[TokenLogprobs]) -> dict[str, Any]:
        return {
            "input_token_logprobs": [],
            "output_token_logprobs": [self._triple(one.logprob, token) for token, one in zip(ids, found, strict=False)],
            "output_top_logprobs": [
                [self._triple(*pair) for pair in zip(one.top_logprobs, one.top_ids, strict=True)] for one in found
            ],
        }

    def _triple(self, logprob: float, token: int) -> tuple[float, int, str | None]:
        text = self._tokenizer.token_text(token) if self._with_text else None
        return max(logprob, LOWEST_LOGPROB), token, text


def _finish_reason(end: End) -> dict[str, Any]:
    match end.reason:
        case "stop":
            return {"type": "stop", "matched": end.matched}
        case "length":
            return {"type": "length", "length": end.completion_tokens}
        case reason:
            return {"type": reason, "message": end.message, "status_code": end.status}

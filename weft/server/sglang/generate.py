"""`/generate`, with SGLang's fields and answers: text or ids, one or a batch, streams that repeat the whole text.

Were each token's event to repeat everything, a stream would cost the square of its length. So what a completion has is
kept as it will be written, and the longer it is, the more must be new before it is told again (`Growing.is_due`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.client.aux_outputs import hidden_states
from weft.client.generation import Completion, Delta
from weft.client.prompt import Prompt, with_reasoning_marks
from weft.messages.replies import Extra
from weft.messages.sampling import SamplingParams
from weft.server.admin.sessions import SessionFields, session_params
from weft.server.body import json_bytes, read_json, written
from weft.server.context import ServerContext
from weft.server.errors import ApiError, not_supported
from weft.server.fields.embeds import NOT_GIVEN, Embeds, embeds_of
from weft.server.fields.extra_sampling import ExtraSampling, ExtraSamplingFields, extra_sampling
from weft.server.fields.grammar import grammar_of
from weft.server.fields.truncation import Side, truncation
from weft.server.openai.translate import (
    cache_salt,
    encode_mixed,
    logit_bias,
    request_name,
    stop_strings,
    stream_interval,
    submit,
    timeout_ms,
)
from weft.server.sglang.logprobs import JsonList, NativeLogprobs, logprob_params, require_start
from weft.server.sglang.meta_info import meta_info
from weft.server.stream import Answer
from weft.server.tenants import salt_of, tenant_of

FREE_LEN = 32_768  # bytes of an answer so far that every event of a stream may repeat
SPACING = 32  # from there on, an event comes when this part of the last one is new


class NativeSampling(ExtraSamplingFields, kw_only=True):
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
    stream_interval: int | None = None

    json_schema: Any = (
        None  # this and the next: what the answer must be (`server/fields/grammar.py`)
    )
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    structural_tag: Any = None
    structured_outputs: dict[str, Any] | None = None

    beam_width: Any = None


_REFUSED = ("beam_width",)
_PASSED = (
    *(
        "n",
        "min_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "ignore_eos",
        "skip_special_tokens",
    ),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)


class SglangGenerateRequest(msgspec.Struct, kw_only=True):
    """`text`, `input_ids` or `input_embeds`. A list of one of them is a batch, and is answered by a list."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    input_embeds: msgspec.Raw = msgspec.field(default_factory=lambda: NOT_GIVEN)
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int]] | None = None
    return_text_in_logprobs: bool | None = None
    return_hidden_states: bool | list[bool] | None = None
    priority: int | None = None
    timeout_ms: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    session_params: SessionFields | list[SessionFields] | None = None
    custom_logit_processor: Any = None  # SGLang has it here, and its parameters in sampling_params
    logits_processors: Any = None
    max_thinking_tokens: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    model: str | None = None


async def generate(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, SglangGenerateRequest)
    context.require_model(body.model)
    embeds = await embeds_of(context, body.input_embeds)
    sources, is_batch = _sources(body, embeds)
    sampling = _spread("sampling_params", body.sampling_params or NativeSampling(), len(sources))
    with_logprobs = _spread("return_logprob", body.return_logprob or False, len(sources))
    top = _spread("top_logprobs_num", body.top_logprobs_num or 0, len(sources))
    starts = _spread(
        "logprob_start_len",
        -1 if body.logprob_start_len is None else body.logprob_start_len,
        len(sources),
    )
    wanted_ids = _wanted_ids(body.token_ids_logprob, len(sources))
    logprobs = [
        logprob_params(*own) for own in zip(with_logprobs, starts, top, wanted_ids, strict=True)
    ]
    made: dict[int, ExtraSampling] = {
        id(own): _extra_sampling(body, own) for own in sampling
    }  # many prompts may have the same
    params = [
        _params(context.info.sampling, *fields, made[id(fields[0])])
        for fields in zip(sampling, logprobs, strict=True)
    ]
    states = _spread("return_hidden_states", body.return_hidden_states or False, len(sources))
    params = [_with_states(*fields) for fields in zip(params, states, strict=True)]
    for one in params:
        one.check(context.client.engine.vocab_size)
    rids = _rids(request, body.rid, len(sources))
    fields = _spread("session_params", body.session_params, len(sources))
    sessions = [
        session_params(context, request, own, n=one.n)
        for own, one in zip(fields, params, strict=True)
    ]
    salt = salt_of(context, request, cache_salt(body.cache_salt, body.extra_key))
    cut, context_len = (
        truncation(body, auto=context.config.auto_truncate),
        context.info.context_length,
    )
    ids = await encode_mixed(context, sources, add_special_tokens=True, truncates=cut is not None)
    if cut is not None:
        ids = [
            cut(own, context_len, one.max_new_tokens) for own, one in zip(ids, params, strict=True)
        ]
    for own, one in zip(ids, params, strict=True):
        require_start(one, own, behind_history=body.session_params is not None)
    prompts = [
        Prompt(
            ids=one_ids,
            params=with_reasoning_marks(one, context.formats.reasoning, context.tokenizer, one_ids),
            rid=rid,
            group=body.rid if isinstance(body.rid, str) else "",
            tenant=tenant_of(context, request, None),
            priority=body.priority or 0,
            cache_salt=salt,
            timeout_ms=timeout_ms(context, request, body.timeout_ms),
            session=session,
            vectors=vectors,
            stream_interval=stream_interval(context, asked.stream_interval),
        )
        for one_ids, vectors, asked, one, rid, session in zip(
            ids,
            embeds.vectors if embeds else [b""] * len(ids),
            sampling,
            params,
            rids,
            sessions,
            strict=True,
        )
    ]
    generation = submit(context, prompts, stream=bool(body.stream))
    reply = NativeReply(
        completions=generation.completions,
        as_list=is_batch or len(generation.completions) > 1,
        logprobs=[_logprobs(context, completion, body) for completion in generation.completions],
        states=[one.given if one.params.hidden_states else None for one in generation.completions],
        version=lambda: context.client.weight_version,
    )
    return Answer(generation, reply)


def _logprobs(
    context: ServerContext, completion: Completion, body: SglangGenerateRequest
) -> NativeLogprobs | None:
    if completion.params.logprobs is None:
        return None
    with_text = bool(body.return_text_in_logprobs)
    return NativeLogprobs(
        context.tokenizer, completion.params, completion.given, with_text=with_text
    )


def _sources(
    body: SglangGenerateRequest, embeds: Embeds | None
) -> tuple[Sequence[str | list[int]], bool]:
    """The prompts, and whether they are a batch."""
    if [body.text, body.input_ids, embeds].count(None) != 2:
        raise ApiError(400, "give one of text, input_ids and input_embeds", param="text")
    if embeds is not None:
        return embeds.ids, embeds.is_batch
    if isinstance(body.text, str):
        return [body.text], False
    if body.text is None:
        kinds = set(map(type, body.input_ids or []))  # there may be millions
        if len(kinds) > 1:
            raise ApiError(400, "input_ids mixes token ids with lists", param="input_ids")
        if kinds != {list}:
            return [cast(list[int], body.input_ids or [])], False
    batch = body.text if body.text is not None else cast(list[list[int]], body.input_ids)
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


def _wanted_ids(ids: list[int | list[int]] | None, count: int) -> list[Sequence[int]]:
    """`token_ids_logprob` for each prompt: ids for all of them, or a list for each."""
    lists = [item for item in ids or () if not isinstance(item, int)]
    same = [item for item in ids or () if isinstance(item, int)]
    if lists and same:
        raise ApiError(
            400, "token_ids_logprob mixes token ids with lists", param="token_ids_logprob"
        )
    return _spread("token_ids_logprob", lists, count) if lists else [same] * count


def _extra_sampling(body: SglangGenerateRequest, sampling: NativeSampling) -> ExtraSampling:
    """With those that stand beside `sampling_params`."""
    fields = ("custom_logit_processor", "logits_processors", "max_thinking_tokens")
    beside = {name: getattr(body, name) for name in fields if getattr(body, name) is not None}
    return extra_sampling(msgspec.structs.replace(sampling, **beside))


def _params(
    defaults: SamplingParams,
    body: NativeSampling,
    logprobs: dict[str, Any],
    extra_sampling: ExtraSampling,
) -> SamplingParams:
    for name in _REFUSED:
        if getattr(body, name):
            raise not_supported(f"sampling_params.{name}")
    given = {name: getattr(body, name) for name in _PASSED if getattr(body, name) is not None}
    return msgspec.structs.replace(
        defaults,
        **given,
        max_new_tokens=body.max_new_tokens,
        logit_bias=logit_bias(body.logit_bias),
        stop=stop_strings(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop=bool(body.no_stop_trim),
        seed=body.sampling_seed if body.sampling_seed is not None else body.seed,
        **logprobs,
        **extra_sampling,
        grammar=grammar_of(body),
    )


def _with_states(params: SamplingParams, wanted: bool) -> SamplingParams:
    return msgspec.structs.replace(params, hidden_states="all") if wanted else params


def _rids(request: Request, rid: str | list[str] | None, count: int) -> list[str]:
    if isinstance(rid, list):
        return [request_name(request, name) for name in _spread("rid", rid, count)]
    name = request_name(request, rid)
    return [name] if count == 1 else [f"{name}-{number}" for number in range(count)]


class Growing:
    """What one completion of a stream has so far, and how much of that was told last."""

    def __init__(self, logprobs: NativeLogprobs | None) -> None:
        self.logprobs = logprobs
        self._texts: list[str] = []
        self._ids = JsonList()
        self._text_len = 0  # characters
        self._told_len = 0

    @property
    def is_opened(self) -> bool:
        """Whether it has been told at all."""
        return self._told_len > 0

    @property
    def is_due(self) -> bool:
        """Whether enough is new: always while it is small, from `FREE_LEN` on a part of `1 / SPACING`.

        All events of one completion have then at most `SPACING + 1` times the bytes of the last, but for those that
        are told of it while it is small.
        """
        size = self._size()
        return size <= FREE_LEN or size - self._told_len >= self._told_len // SPACING

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._text_len += len(delta.text)
        self._ids.extend(delta.token_ids)
        if self.logprobs is not None:
            self.logprobs.add(delta)

    def tell(self) -> tuple[str, msgspec.Raw]:
        """All text and ids."""
        self._texts = ["".join(self._texts)]
        self._told_len = max(self._size(), 1)
        return self._texts[0], self._ids.raw()

    def _size(self) -> int:
        """About how many bytes telling it takes."""
        return (
            self._text_len
            + len(self._ids)
            + (self.logprobs.num_bytes if self.logprobs is not None else 0)
        )


class NativeReply:
    """Answers of SGLang's form. Each event of a stream repeats everything that came before."""

    def __init__(
        self,
        *,
        completions: Sequence[Completion],
        as_list: bool,
        logprobs: Sequence[NativeLogprobs | None],
        states: Sequence[Sequence[Extra] | None],
        version: Callable[[], str],
    ) -> None:
        self._completions = completions
        self._as_list = as_list
        self._version = version  # of the weights that compute now
        self._growing = [Growing(own) for own in logprobs]
        self._states = states  # what was given to those that want hidden states

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        for delta in deltas:
            self._growing[delta.choice].add(delta)
        answers = [written(self._answer(delta)) for delta in deltas]
        return json_bytes(answers if self._as_list else answers[0])

    def events(self, delta: Delta) -> bytes:
        growing = self._growing[delta.choice]
        growing.add(delta)
        if growing.is_opened and delta.end is None and not growing.is_due:
            return b""
        answer = self._answer(delta)
        if self._as_list:
            answer["index"] = delta.choice
        return b"data: " + json_bytes(answer) + b"\n\n"

    def closing(self) -> bytes:
        return b""

    def _answer(self, delta: Delta) -> dict[str, Any]:
        choice = delta.choice
        growing = self._growing[choice]
        meta = meta_info(self._completions[choice], delta, self._version())
        if delta.end is not None and (given := self._states[choice]) is not None:
            meta["hidden_states"] = hidden_states(given, delta.end.prompt_tokens, delta.num_tokens)
        logprobs = growing.logprobs
        if logprobs is not None:
            if not growing.is_opened or delta.end is not None:  # they are long, and do not change
                meta |= logprobs.of_prompt()
            meta |= logprobs.of_output()
        text, ids = growing.tell()
        return {"text": text, "output_ids": ids, "meta_info": meta}

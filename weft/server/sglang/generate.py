"""`/generate` with SGLang's fields: text, token ids or input embeddings, one prompt or a batch.

Other fields apply to all prompts, or are lists with one entry per prompt. `sglang/reply.py` writes
the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.client.generation import Completion, TextDelivery
from weft.client.prompt import with_reasoning_marks
from weft.client.requests import pack_ids
from weft.json_types import JsonObject
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.server.body import read_json
from weft.server.causes import cause_reader
from weft.server.context import ServerContext
from weft.server.errors import ApiError, not_supported
from weft.server.fields.engine import want_engine_of
from weft.server.fields.handoff import with_handoff
from weft.server.fields.input_embeds import ABSENT, Embeds, embeds_of
from weft.server.fields.per_prompt import per_prompt
from weft.server.fields.sampling import CommonSamplingFields, sampling_params
from weft.server.fields.session import SessionFields, session_params
from weft.server.limits import check_size
from weft.server.media import require_uncut
from weft.server.model_names import adapter_of
from weft.server.operation import Operation, post
from weft.server.prompt_ids import Truncation, truncation
from weft.server.requests import (
    Side,
    checked_rid,
    common_request,
    request_name,
    sharing_of,
    submit,
)
from weft.server.sglang.logprobs import NativeLogprobs, logprob_params, require_start
from weft.server.sglang.media import KINDS, NO_MEDIA, NativeMedia, load_media
from weft.server.sglang.reply import NativeReply
from weft.server.stream import Answer


class NativeSampling(CommonSamplingFields, kw_only=True):
    """SGLang's `sampling_params`."""

    max_new_tokens: int | None = 128
    min_new_tokens: int | None = None
    sampling_seed: int | None = None
    seed: int | None = None
    beam_width: Any = None  # refused unless it has no effect


# Sampling fields that clients also write beside `sampling_params`.
BESIDE = ("custom_logit_processor", "custom_params", "logits_processors", "max_thinking_tokens")


class SglangGenerateRequest(msgspec.Struct, kw_only=True):
    """`text`, `input_ids` or `input_embeds`.

    A list of one of them is a batch; its answer is a list.
    """

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    input_embeds: msgspec.Raw = msgspec.field(default_factory=lambda: ABSENT)
    # An address or base64, or a list of them; for a batch, a list with one entry per prompt.
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    mm_processor_kwargs: JsonObject | None = None  # sizes of images (vLLM)
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    routed_dp_rank: int | None = None  # the engine of the request (`server/fields/engine.py`)
    data_parallel_rank: int | None = None  # the same
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int]] | None = None
    return_text_in_logprobs: bool | None = None
    return_hidden_states: bool | list[bool] | None = None
    return_cached_tokens_details: bool | None = None
    return_cache_cause: bool | None = None  # why not more of the prompt was cached
    priority: int | None = None
    service_tier: str | None = None
    timeout_ms: int | None = None
    ttft_ms: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    session_params: SessionFields | list[SessionFields] | None = None
    # SGLang has this field here, and its parameters in sampling_params.
    custom_logit_processor: Any = None
    custom_params: Any = None
    logits_processors: Any = None
    max_thinking_tokens: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    model: str | None = None
    lora_path: str | list[str | None] | None = None  # names of adapters
    # Another server computes or continues the prompts; for a batch, lists.
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    kv_transfer_params: Any = None


async def generate(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, SglangGenerateRequest)
    embeds = await embeds_of(context, body.input_embeds)
    sources, is_batch = _sources(body, embeds)
    asked = _asked(context, body, len(sources))
    vectors = [b""] * len(sources) if embeds is None else embeds.vectors
    media = NO_MEDIA
    if body.image_data or body.video_data or body.audio_data:
        if embeds is not None:
            message = "input_embeds and images, videos and sounds exclude each other"
            raise ApiError(400, message, param="input_embeds")
        require_uncut(body.truncate_prompt_tokens)
        media_fields = {name: getattr(body, name) for name in KINDS}
        media = await load_media(
            context,
            media_fields,
            sources,
            is_batch=is_batch,
            kwargs=body.mm_processor_kwargs,
        )
        sources = media.sources
    requests = await _requests(
        context,
        request,
        body,
        sources,
        vectors,
        asked,
        media,
    )
    deliveries = [own.delivery for own in asked]
    generation = submit(context, requests, deliveries, stream=bool(body.stream))
    reply = NativeReply(
        completions=generation.completions,
        as_list=is_batch or len(generation.completions) > 1,
        logprobs=[_logprobs(context, body, completion) for completion in generation.completions],
        version=lambda: context.client.state.weight_version,
    )
    return Answer(generation, reply)


# ---- fields of each prompt


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The parameters of one prompt."""

    params: SamplingParams
    delivery: TextDelivery
    session: SessionFields | None


def _asked(
    context: ServerContext,
    body: SglangGenerateRequest,
    count: int,
) -> list[_Asked]:
    sampling = per_prompt("sampling_params", body.sampling_params or NativeSampling(), count)
    with_logprobs = per_prompt("return_logprob", body.return_logprob or False, count)
    num_top = per_prompt("top_logprobs_num", body.top_logprobs_num or 0, count)
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    starts = per_prompt("logprob_start_len", start, count)
    wanted_ids = _wanted_ids(body.token_ids_logprob, count)
    with_states = per_prompt("return_hidden_states", body.return_hidden_states or False, count)
    sessions = per_prompt("session_params", body.session_params, count)
    made: dict[int, SamplingParams] = {}  # one entry for prompts that share their fields
    found = []
    for index, own in enumerate(sampling):
        if id(own) not in made:
            made[id(own)] = _params(context.info.sampling, body, own)
        others = logprob_params(
            with_logprobs[index], starts[index], num_top[index], wanted_ids[index]
        )
        if with_states[index]:
            others["hidden_states"] = "all"
        params = made[id(own)]
        if others:
            params = msgspec.structs.replace(params, **others)
        delivery = TextDelivery(own.stream_interval or context.config.stream_interval)
        found.append(_Asked(params=params, delivery=delivery, session=sessions[index]))
    return found


def _params(
    defaults: SamplingParams, body: SglangGenerateRequest, sampling: NativeSampling
) -> SamplingParams:
    """Sampling parameters, including the sampling fields beside `sampling_params`."""
    beside = {}
    for name in BESIDE:
        value = getattr(body, name)
        if value is not None:
            beside[name] = value
    if beside:
        sampling = msgspec.structs.replace(sampling, **beside)
    if sampling.beam_width:
        raise not_supported("sampling_params.beam_width")
    return sampling_params(sampling, defaults)


def _wanted_ids(ids: list[int | list[int]] | None, count: int) -> list[Sequence[int]]:
    """`token_ids_logprob` per prompt: the same ids for all, or a list for each."""
    lists: list[list[int]] = []
    same: list[int] = []
    for item in ids or ():
        if isinstance(item, int):
            same.append(item)
        else:
            lists.append(item)
    if lists and same:
        message = "token_ids_logprob mixes token ids with lists"
        raise ApiError(400, message, param="token_ids_logprob")
    return per_prompt("token_ids_logprob", lists, count) if lists else [same] * count


# ---- prompts


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
        kinds = set(map(type, body.input_ids or []))  # may have millions of entries
        if len(kinds) > 1:
            raise ApiError(400, "input_ids mixes token ids with lists", param="input_ids")
        if kinds != {list}:
            return [cast(list[int], body.input_ids or [])], False
    batch = body.text if body.text is not None else cast(list[list[int]], body.input_ids)
    if not batch:
        raise ApiError(400, "there is no prompt; at least one is needed", param="text")
    return batch, True


async def _requests(
    context: ServerContext,
    request: Request,
    body: SglangGenerateRequest,
    sources: Sequence[str | list[int]],
    vectors: Sequence[bytes],
    asked: Sequence[_Asked],
    media: NativeMedia,
) -> list[GenerateRequest]:
    """`vectors`: input embeddings of each prompt, empty if it has none. Raises `ApiError`."""
    if body.routed_dp_rank is not None or body.data_parallel_rank is not None:
        want_engine_of(body, context.config.dp_size)
    rids = _rids(request, body.rid, len(sources))
    sessions = []
    for own in asked:
        session = None
        if own.session is not None:
            session = session_params(context, request, own.session, n=own.params.n)
        sessions.append(session)
    cut = None
    if not media.loaded:
        cut = truncation(context, body.truncate_prompt_tokens, body.truncation_side)
    ids = await _encoded(context, sources, asked, cut)
    for own_ids, own in zip(ids, asked, strict=True):
        require_start(own.params, own_ids, after_history=body.session_params is not None)
    adapters = [""] * len(asked)
    if body.lora_path is not None or context.adapters.by_name:
        paths = per_prompt("lora_path", body.lora_path, len(asked))
        adapters = [adapter_of(context, body.model, path) for path in paths]
    check_size(context, list(map(len, ids)), [own.params.n for own in asked])
    vocab_size = context.client.engine.vocab_size
    common = common_request(
        context,
        request,
        body,
        asked[0].params,
        rid=rids[0],
        sharing=sharing_of(context, request, salt=body.cache_salt, extra_key=body.extra_key),
    )
    tells_cause_to = None
    if body.return_cache_cause:
        tells_cause_to = cause_reader(request, common.tenant)
    found = []
    for index, own in enumerate(asked):
        params = own.params
        if params.thinking_budget is not None:
            params = with_reasoning_marks(
                params, context.formats.reasoning, context.tokenizer, ids[index]
            )
        one = msgspec.structs.replace(
            common,
            input_ids=pack_ids(ids[index], vocab_size),
            sampling=params,
            rid=rids[index],
            group=body.rid if isinstance(body.rid, str) else "",
            adapter=adapters[index],
            session=sessions[index],
            vectors=vectors[index],
            media=media.placed(index, ids[index]) if media.loaded else (),
            tells_cache=bool(body.return_cached_tokens_details),
            tells_cause_to=tells_cause_to,
        )
        found.append(one)
    if body.bootstrap_room is not None or body.kv_transfer_params:
        return with_handoff(context, request, body, found)
    return found


async def _encoded(
    context: ServerContext,
    sources: Sequence[str | list[int]],
    asked: Sequence[_Asked],
    cut: Truncation | None,
) -> list[list[int]]:
    """The ids of each prompt, truncated if requested."""
    context_len = context.info.context_length
    ids = await context.tokenizer.encode_prompts(
        sources, context_len=context_len if cut is None else None
    )
    if cut is None:
        return ids
    kept = []
    for own_ids, own in zip(ids, asked, strict=True):
        kept.append(cut.cut(own_ids, context_len, own.params.max_new_tokens))
    return kept


def _rids(request: Request, rid: str | list[str] | None, count: int) -> list[str]:
    if isinstance(rid, list):
        return [checked_rid(name) for name in per_prompt("rid", rid, count)]
    name = request_name(request, rid)
    if count == 1:
        return [name]
    return [f"{name}-{number}" for number in range(count)]


def _logprobs(
    context: ServerContext, body: SglangGenerateRequest, completion: Completion
) -> NativeLogprobs | None:
    if completion.spec.request.sampling.logprobs is None:
        return None
    return NativeLogprobs(
        context.tokenizer,
        completion.spec.request.sampling,
        completion.aux_outputs,
        with_text=bool(body.return_text_in_logprobs),
    )


ROUTES = (
    post(
        "/generate",
        generate,
        "Continue texts or token ids (SGLang)",
        SglangGenerateRequest,
    ),
    Operation("PUT", "/generate", generate, "The same as POST", SglangGenerateRequest),
)

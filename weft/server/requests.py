"""From the fields that generating APIs share to `GenerateRequest`s, and to a running generation.

Here the server makes every request to the engine, once: chat and text completions, `/infill`,
`/generate` and the pooling APIs use this module. `fields/sampling.py` reads the sampling fields of
a body; each API writes its own answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace
from starlette.requests import Request

from weft.client.generation import Generation, TextDelivery
from weft.client.prompt import with_reasoning_marks
from weft.client.requests import pack_ids
from weft.config.pairs import parse_tenant_ttft
from weft.json_types import JsonObject
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import InvalidParam, SamplingParams
from weft.observe.request_context import rename
from weft.server.auth import owner_of
from weft.server.causes import ask_causes, cause_reader
from weft.server.context import ServerContext
from weft.server.errors import ApiError, over
from weft.server.fields.engine import want_engine_of
from weft.server.fields.handoff import with_handoff
from weft.server.fields.numbers import header_number
from weft.server.fields.sampling import CommonSamplingFields, sampling_params
from weft.server.fields.session import SessionFields, session_params
from weft.server.limits import check_size, check_totals, require_accepting, require_embeds_room
from weft.server.model_names import adapter_of

Side = Literal["left", "right"]
BACKGROUND_TIER = "flex"
# The other values of OpenAI and Anthropic ask for nothing that one server has in two kinds.
ONLINE_TIERS = ("auto", "default", "priority", "scale", "standard_only")
KEY_END = "\x1e"  # no name of a key contains it


class CommonFields(Protocol):
    """The fields of every body that makes a request to the engine."""

    priority: int | None
    service_tier: str | None
    timeout_ms: int | None
    ttft_ms: int | None


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options` of OpenAI."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # needs include_usage (vLLM)


class GenerationFields(CommonSamplingFields, kw_only=True):
    """The common fields of all APIs that generate, whatever form their answers have."""

    model: str | None = None
    lora_path: str | None = None  # name of an adapter (SGLang); an adapter in `model` wins
    stream: bool | None = None
    min_tokens: int | None = None
    seed: int | None = None
    sampling_seed: int | None = None
    # Has no effect: tokenizers.json has no such spaces.
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    return_cached_tokens_details: bool | None = None  # where the tokens were cached (SGLang)
    return_cache_cause: bool | None = None  # why not more of them were
    # Constraints of the answer (`server/fields/grammar.py`):
    response_format: JsonObject | None = None
    guided_json: Any = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    user: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    priority: int | None = None
    service_tier: str | None = None  # flex: in the background
    timeout_ms: int | None = None
    ttft_ms: int | None = None
    session_id: str | None = None  # has no effect here; routers use it for affinity
    routed_dp_rank: int | None = None  # the engine of the request (`server/fields/engine.py`)
    data_parallel_rank: int | None = None  # the same


class SampledRequest(GenerationFields, kw_only=True):
    """The common fields of chat completions, text completions and `/infill`."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    return_token_ids: bool | None = None
    # Log probabilities then name a token "token_id:17" instead of its text.
    return_tokens_as_token_ids: bool | None = None
    return_hidden_states: bool | None = None  # the state that the last token was sampled from
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None  # beside the top logprobs of each position
    rid: str | None = None
    request_id: str | None = None
    session_params: SessionFields | None = None  # of SGLang's /generate
    # Another server computes or continues the prompt (`server/fields/handoff.py`):
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    kv_transfer_params: Any = None


def copy_generation(source: GenerationFields, target: GenerationFields) -> None:
    """Copy the common fields of a request to its translation to another API."""
    for name in GenerationFields.__struct_fields__:
        setattr(target, name, getattr(source, name))


def sampling_of(
    body: SampledRequest,
    defaults: SamplingParams,
    *,
    max_new_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    fewest_tokens: int = 1,
) -> SamplingParams:
    """The fields of a request as sampling parameters; other parameters are as in `defaults`.

    Raises `ApiError` for a value of the wrong form and `InvalidParam` for fewer new tokens than
    `fewest_tokens`. Other ranges are checked when the request is submitted.
    """
    if max_new_tokens == -1:  # as many as the context allows
        max_new_tokens = None
    if max_new_tokens is not None and max_new_tokens < fewest_tokens:
        message = (
            f"max_tokens is {max_new_tokens}; it must be at least {fewest_tokens}, but for echo "
            "and prompt_logprobs of /v1/completions"
        )
        raise InvalidParam("max_tokens", message)
    others: JsonObject = {}
    if body.logprob_token_ids:
        if logprobs is None:
            raise ApiError(400, "logprob_token_ids needs logprobs", param="logprob_token_ids")
        others["logprob_token_ids"] = tuple(body.logprob_token_ids)
    if body.return_hidden_states:
        others["hidden_states"] = "last"
    return sampling_params(
        body,
        defaults,
        max_new_tokens=max_new_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        **others,
    )


# ---- requests


class Sharing(NamedTuple):
    """The parties that share the engine and the prefix cache with a request."""

    tenant: str  # the policy `fair` counts the request for this tenant
    cache_salt: str  # names the part of the prefix cache


def sharing_of(
    context: ServerContext,
    request: Request,
    *,
    user: str = "",
    salt: str | None = None,
    extra_key: str | None = None,
) -> Sharing:
    """The tenant of a request is the name of its key, and its salt comes from its body.

    A client cannot gain a larger share by inventing names, unless the operator makes the `user` of
    a request count (`--tenant-by user`). SGLang's `extra_key` does the same as `cache_salt`; a
    request with both shares the cache with requests that have the same two. If the server isolates
    keys, a request shares the cache only with requests of its key.
    """
    owner = owner_of(request)
    tenant = owner
    if user and context.config.tenant_by != "key":
        tenant = f"{owner}/{user}" if owner else user
    cache_salt = salt or ""
    if extra_key:
        cache_salt = f"{cache_salt}\x1f{extra_key}"
    if context.config.isolate_cache_by_key:
        cache_salt = f"{owner}{KEY_END}{cache_salt}"
    return Sharing(tenant, cache_salt)


def request_name(
    request: Request,
    rid: str | None,
    request_id: str | None = None,
) -> str:
    """The name of a request: from its body, else from `RequestMiddleware` (its header, or a new
    name)."""
    name = rid or request_id
    if name is None:
        return str(request.scope["weft.rid"])
    rename(checked_rid(name))
    return name


def checked_rid(name: str) -> str:
    if not name.isprintable():
        raise ApiError(400, "rid must be printable characters", param="rid")
    return name


def _deadlines(
    context: ServerContext,
    request: Request,
    body: CommonFields,
    tenant: str,
) -> tuple[int, int]:
    """(timeout_ms, ttft_ms) of the body, else of the headers X-Request-Timeout-Ms and
    X-Request-Ttft-Ms; 0: none. The first token's deadline falls back to `--tenant-ttft-ms`."""
    timeout = body.timeout_ms
    ttft = body.ttft_ms
    headers = request.headers
    if timeout is None and "x-request-timeout-ms" in headers:
        timeout = header_number(
            headers["x-request-timeout-ms"], "timeout_ms", "X-Request-Timeout-Ms"
        )
    if ttft is None and "x-request-ttft-ms" in headers:
        ttft = header_number(headers["x-request-ttft-ms"], "ttft_ms", "X-Request-Ttft-Ms")
    if ttft is None and context.config.tenant_ttft_ms:
        ttft = dict(parse_tenant_ttft(context.config.tenant_ttft_ms)).get(tenant)
    longest = context.limits.max_timeout_ms
    for name, asked_ms in (("timeout_ms", timeout), ("ttft_ms", ttft)):
        if asked_ms is not None and asked_ms > longest:
            message = f"{name} is {asked_ms:,}; 1 to {longest:,} are allowed"
            raise over("max_timeout_ms", message, param=name)
    return timeout or 0, ttft or 0


def is_background(tier: str | None) -> bool:
    """Whether a request with this `service_tier` is done when others leave room for it. Raises
    `ApiError`."""
    if tier is None or tier in ONLINE_TIERS:
        return False
    if tier == BACKGROUND_TIER:
        return True
    allowed = ", ".join((BACKGROUND_TIER, *ONLINE_TIERS))
    raise ApiError(400, f"service_tier is {tier[:40]!r}; allowed: {allowed}", param="service_tier")


def common_request(
    context: ServerContext,
    request: Request,
    body: CommonFields,
    sampling: SamplingParams,
    *,
    rid: str,
    sharing: Sharing,
) -> GenerateRequest:
    """The request of a body, still without its prompt and its adapter."""
    timeout_ms, ttft_ms = _deadlines(context, request, body, sharing.tenant)
    return GenerateRequest(
        rid=rid,
        sampling=sampling,
        tenant=sharing.tenant,
        cache_salt=sharing.cache_salt,
        priority=body.priority or 0,
        background=is_background(body.service_tier),
        timeout_ms=timeout_ms,
        ttft_ms=ttft_ms,
    )


def make_requests(
    context: ServerContext,
    request: Request,
    body: SampledRequest,
    ids: Sequence[Sequence[int]],
    sampling: SamplingParams,
) -> list[GenerateRequest]:
    """One request for each list of ids, all with the same parameters.

    With a budget of reasoning, the requests differ in where reasoning begins.
    """
    user = (body.user or "")[: context.limits.max_user_len]
    if body.stream_options is not None and not body.stream:
        _require_no_options(body.stream_options)
    session = None
    if body.session_params is not None:
        if body.session_id is not None:
            message = "session_id and session_params exclude each other"
            raise ApiError(400, message, param="session_id")
        session = session_params(context, request, body.session_params, n=sampling.n * len(ids))
    adapter = ""
    if body.lora_path is not None or context.adapters.by_name:
        adapter = adapter_of(context, body.model, body.lora_path)
    if body.routed_dp_rank is not None or body.data_parallel_rank is not None:
        want_engine_of(body, context.config.dp_size)
    check_size(context, list(map(len, ids)), [sampling.n] * len(ids))
    vocab_size = context.client.engine.vocab_size
    common = common_request(
        context,
        request,
        body,
        sampling,
        rid=request_name(request, body.rid, body.request_id),
        sharing=sharing_of(
            context,
            request,
            user=user,
            salt=body.cache_salt,
            extra_key=body.extra_key,
        ),
    )
    tells_cause_to = None
    if body.return_cache_cause:
        tells_cause_to = cause_reader(request, common.tenant)
    found: list[GenerateRequest] = []
    for prompt_ids in ids:
        own_sampling = sampling
        if sampling.thinking_budget is not None:
            own_sampling = with_reasoning_marks(
                sampling,
                context.formats.reasoning,
                context.tokenizer,
                prompt_ids,
            )
        one = replace(
            common,
            input_ids=pack_ids(prompt_ids, vocab_size),
            sampling=own_sampling,
            user=user,
            adapter=adapter,
            session=session,
            tells_cache=bool(body.return_cached_tokens_details),
            tells_cause_to=tells_cause_to,
        )
        found.append(one)
    if body.bootstrap_room is not None or body.kv_transfer_params:
        return with_handoff(context, request, body, found)
    return found


def _require_no_options(options: StreamOptions) -> None:
    if options.include_usage or options.continuous_usage_stats:
        message = "stream_options are only for streams; set stream to true"
        raise ApiError(400, message, param="stream_options")


def submit(
    context: ServerContext,
    requests: Sequence[GenerateRequest],
    deliveries: Sequence[TextDelivery] = (),
    *,
    stream: bool,
    valid: SamplingParams | None = None,
) -> Generation:
    """Start generating, if the server accepts new work and the requests are within the limits.

    `valid`: parameters that were checked before the work on the prompts.

    Raises `ApiError`, `InvalidParam` or `ContextExceeded`.
    """
    require_accepting(context.readiness)
    check_totals(context, requests)
    for request in requests:
        if request.vectors or request.media:
            require_embeds_room(context, requests)
            break
    generation = context.client.submit(requests, deliveries, stream=stream, valid=valid)
    if requests[0].tells_cause_to is not None:
        generation.before_answer = partial(ask_causes, context, generation)
    return generation

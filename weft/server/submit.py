"""Turns the fields that generating APIs share into prompts, and prompts into a running generation.

Chat and text completions, `/infill`, `/generate` and the pooling APIs use this module.
`fields/sampling.py` reads the sampling fields of a body; each API writes its own answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import msgspec
from starlette.requests import Request

from weft.client.adapters import DEFAULT_MODEL, AdapterRefused, NamedAdapter
from weft.client.generation import Generation
from weft.client.prompt import Prompt, with_reasoning_marks
from weft.config.pairs import parse_tenant_ttft
from weft.json_types import JsonObject
from weft.messages.sampling import InvalidParam, SamplingParams
from weft.observe.request_context import rename
from weft.server.auth import owner_of
from weft.server.context import ServerContext
from weft.server.errors import ApiError, failed, over
from weft.server.fields.engine import want_engine_of
from weft.server.fields.handoff import with_handoff
from weft.server.fields.numbers import header_number
from weft.server.fields.sampling import CommonSamplingFields, sampling_params
from weft.server.fields.session import SessionFields, session_params
from weft.server.limits import check_totals, require_embeds_room

Side = Literal["left", "right"]
KEY_END = "\x1e"  # no name of a key contains it


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
        message = f"max_tokens is {max_new_tokens}; it must be at least {fewest_tokens}"
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


def require_model(context: ServerContext, model: str | None) -> None:
    """Raise `ApiError` 404 unless `model` is absent or names the served model or an adapter, or the
    server accepts any name. During startup, raise 503 for an unknown name, which may become that of
    an adapter."""
    own_name = context.info.model_name
    if model in (own_name, None, "", DEFAULT_MODEL):
        return
    if adapter_named(context, str(model)) or context.config.any_model_name:
        return
    require_accepting(context)
    message = f"the model {str(model)[:128]!r} does not exist; this server has {own_name!r}"
    if context.adapters.by_name:
        message += f" and the adapters {', '.join(map(repr, context.adapters.by_name))}"
    raise ApiError(404, message, param="model", code="model_not_found")


def adapter_named(context: ServerContext, model: str) -> NamedAdapter | None:
    """The adapter that a `model` names, as "adapter" or "served model:adapter".

    Raises `ApiError` 404 for "served model:adapter" if the adapter is not loaded, and 503 for an
    adapter that was evicted again since it was loaded for this request.
    """
    adapters = context.adapters
    found = adapters.by_name.get(model)
    if found is not None:
        return found
    before = f"{context.info.model_name}:"
    if not model.startswith(before) and not adapters.offered(model):
        return None
    name = model.removeprefix(before)
    found = adapters.by_name.get(name)
    if found is None:
        raise _not_loaded(context, name, "model")
    return found


def _not_loaded(context: ServerContext, name: str, param: str) -> ApiError:
    require_accepting(context)
    try:
        context.adapters.uid_of(name)
    except AdapterRefused as exc:
        if exc.status == 503:
            return failed(503, str(exc))
        return ApiError(exc.status, str(exc), param=param, code="model_not_found")
    raise AssertionError(f"the adapter {name[:64]!r} is loaded")


def adapter_of(context: ServerContext, model: str | None, lora_path: str | None = None) -> str:
    """The uid of the adapter that a request names; "" for the base model. Raises `ApiError` 404 for
    an adapter that is not loaded."""
    named = adapter_named(context, model) if model else None
    if named is not None:
        return named.uid
    if not lora_path:
        return ""
    found = context.adapters.by_name.get(lora_path)
    if found is None:
        raise _not_loaded(context, lora_path, "lora_path")
    return found.uid


def answering_name(context: ServerContext, model: str | None, lora_path: str | None = None) -> str:
    """The model name of an answer: the adapter that a request names, or the served model."""
    adapters = context.adapters
    own_name = context.info.model_name
    asked = (model or "").removeprefix(f"{own_name}:")
    for name in (asked, lora_path):
        if name in adapters.by_name:
            return str(name)
    return own_name


# ---- tokens of prompts


class Truncation(NamedTuple):
    """How to cut a prompt that is too long, instead of refusing it."""

    most: int  # tokens to keep; -1: what the context leaves beside the answer
    side: Side  # where tokens are dropped

    def cut(
        self,
        ids: list[int],
        context_len: int,
        max_new_tokens: int | None,
    ) -> list[int]:
        """The part of a prompt that is kept."""
        most = self.most
        if most == -1:
            most = max(context_len - max(max_new_tokens or 1, 1), 1)
        return ids[:most] if self.side == "right" else ids[-most:]


def truncation(
    context: ServerContext,
    most: int | None,
    side: Side | None,
) -> Truncation | None:
    """How to cut prompts, from `truncate_prompt_tokens` and `truncation_side`.

    None: they are not cut. A server with `--auto-truncate` cuts every prompt that is too long.
    """
    if most is None and not context.config.auto_truncate:
        return None
    return Truncation(-1 if most is None else most, side or "left")


async def encode_texts(
    context: ServerContext,
    texts: Sequence[str],
    *,
    add_special_tokens: bool,
    truncates: bool = False,
) -> list[list[int]]:
    """Ids of each text. Long texts are tokenized off the event loop.

    Raises `ContextExceeded` for a text that is too long, unless it will be truncated.
    """
    context_len = None if truncates else context.info.context_length
    return await context.tokenizer.encode_async(
        texts,
        add_special_tokens=add_special_tokens,
        context_len=context_len,
    )


async def encode_mixed(
    context: ServerContext,
    prompts: Sequence[str | list[int]],
    *,
    add_special_tokens: bool,
    truncates: bool = False,
) -> list[list[int]]:
    """Ids of prompts, some of which are already ids."""
    kinds = set(map(type, prompts))
    if str not in kinds:
        return cast(list[list[int]], list(prompts))
    texts = cast(Sequence[str], prompts)
    if len(kinds) > 1:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = await encode_texts(
        context,
        texts,
        add_special_tokens=add_special_tokens,
        truncates=truncates,
    )
    if len(kinds) == 1:
        return encoded
    in_order = iter(encoded)
    return [next(in_order) if isinstance(prompt, str) else prompt for prompt in prompts]


# ---- prompts


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
    if not name.isprintable():
        raise ApiError(400, "rid must be printable characters", param="rid")
    rename(name)
    return name


class RequestDeadlines(NamedTuple):
    """Milliseconds since the arrival of a request; 0: no deadline."""

    timeout_ms: int  # deadline of its end
    ttft_ms: int  # deadline of its first token


NO_DEADLINES = RequestDeadlines(0, 0)


def deadlines_of(
    context: ServerContext,
    request: Request,
    timeout: int | None,
    ttft: int | None,
    tenant: str,
) -> RequestDeadlines:
    """The deadlines of the request's body, else of its headers X-Request-Timeout-Ms and
    X-Request-Ttft-Ms. The first token's deadline falls back to `--tenant-ttft-ms`."""
    headers = request.headers
    if timeout is None and "x-request-timeout-ms" in headers:
        timeout = header_number(
            headers["x-request-timeout-ms"], "timeout_ms", "X-Request-Timeout-Ms"
        )
    if ttft is None and "x-request-ttft-ms" in headers:
        ttft = header_number(headers["x-request-ttft-ms"], "ttft_ms", "X-Request-Ttft-Ms")
    if ttft is None and context.config.tenant_ttft_ms:
        ttft = dict(parse_tenant_ttft(context.config.tenant_ttft_ms)).get(tenant)
    if timeout is None and ttft is None:
        return NO_DEADLINES
    longest = context.limits.max_timeout_ms
    for name, given in (("timeout_ms", timeout), ("ttft_ms", ttft)):
        if given is not None and given > longest:
            message = f"{name} is {given:,}; 1 to {longest:,} are allowed"
            raise over("max_timeout_ms", message, param=name)
    return RequestDeadlines(timeout or 0, ttft or 0)


def prompts(
    context: ServerContext,
    request: Request,
    body: SampledRequest,
    ids: Sequence[Sequence[int]],
    params: SamplingParams,
) -> list[Prompt]:
    """One `Prompt` for each list of ids, all with the same parameters.

    With a budget of reasoning, the prompts differ in where reasoning begins.
    """
    user = (body.user or "")[: context.limits.max_user_len]
    sharing = sharing_of(
        context,
        request,
        user=user,
        salt=body.cache_salt,
        extra_key=body.extra_key,
    )
    if body.stream_options is not None and not body.stream:
        _require_no_options(body.stream_options)
    session = None
    if body.session_params is not None:
        if body.session_id is not None:
            message = "session_id and session_params exclude each other"
            raise ApiError(400, message, param="session_id")
        session = session_params(context, request, body.session_params, n=params.n * len(ids))
    adapter = ""
    if body.lora_path is not None or context.adapters.by_name:
        adapter = adapter_of(context, body.model, body.lora_path)
    if body.routed_dp_rank is not None or body.data_parallel_rank is not None:
        ranks = (body.routed_dp_rank, body.data_parallel_rank)
        want_engine_of(ranks, context.config.dp_size)
    rid = request_name(request, body.rid, body.request_id)
    deadlines = deadlines_of(context, request, body.timeout_ms, body.ttft_ms, sharing.tenant)
    interval = body.stream_interval
    if interval is None:
        interval = context.config.stream_interval
    found: list[Prompt] = []
    for prompt_ids in ids:
        own_params = params
        if params.thinking_budget is not None:
            own_params = with_reasoning_marks(
                params, context.formats.reasoning, context.tokenizer, prompt_ids
            )
        prompt = Prompt(
            ids=prompt_ids,
            params=own_params,
            rid=rid,
            tenant=sharing.tenant,
            user=user,
            priority=body.priority or 0,
            cache_salt=sharing.cache_salt,
            adapter=adapter,
            timeout_ms=deadlines.timeout_ms,
            ttft_ms=deadlines.ttft_ms,
            session=session,
            stream_interval=interval,
            tells_cache=bool(body.return_cached_tokens_details),
        )
        found.append(prompt)
    if body.bootstrap_room is not None or body.kv_transfer_params:
        return with_handoff(context, request, body, found)
    return found


def _require_no_options(options: StreamOptions) -> None:
    if options.include_usage or options.continuous_usage_stats:
        message = "stream_options are only for streams; set stream to true"
        raise ApiError(400, message, param="stream_options")


def require_accepting(context: ServerContext) -> None:
    """Raise `ApiError` 503 if the server accepts no new work."""
    if not context.readiness.accepting:
        what = "shutting down" if context.readiness.draining else "not ready yet"
        raise ApiError(503, f"the server is {what}", headers={"retry-after": "1"})


def submit(
    context: ServerContext,
    prompts: Sequence[Prompt],
    *,
    stream: bool,
) -> Generation:
    """Start generating, if the server accepts new work and the request is within the limits.

    Raises `ApiError`, `InvalidParam` or `ContextExceeded`.
    """
    require_accepting(context)
    check_totals(context, prompts)
    for prompt in prompts:
        if prompt.vectors or prompt.media:
            require_embeds_room(context, prompts)
            break
    return context.client.submit(prompts, stream=stream)

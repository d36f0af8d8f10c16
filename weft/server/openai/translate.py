"""What chat and text completions have in common on the way in and out: sampling parameters, names, usage, logprobs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

from starlette.requests import Request

from weft.client.aux_outputs import num_hidden_states, num_prompt_logprobs
from weft.client.generation import Delta, Generation
from weft.client.prompt import Prompt, with_reasoning_marks
from weft.messages.replies import TokenLogprobs
from weft.messages.sampling import InvalidParam, SamplingParams
from weft.observe.request_context import rename
from weft.server.admin.sessions import session_params
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.fields.extra_sampling import extra_sampling
from weft.server.fields.grammar import grammar_of
from weft.server.fields.numbers import header_number
from weft.server.limits import over
from weft.server.openai.models import (
    ChatLogprobs,
    CompletionLogprobs,
    CompletionTokensDetails,
    PromptTokensDetails,
    SampledRequest,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from weft.server.tenants import salt_of, tenant_of, user_of
from weft.text.detokenizer import Detokenizer
from weft.text.parsers.output import ParsedOutput
from weft.text.tokenizer import Tokenizer

V = TypeVar("V")
TokenName: TypeAlias = Callable[[int], str]

LOWEST_LOGPROB = -9999.0  # JSON has no infinity
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


def sampling_params(
    body: SampledRequest,
    defaults: SamplingParams,
    *,
    max_new_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    fewest_tokens: int = 1,
) -> SamplingParams:
    """The request's fields as sampling parameters, and `defaults` for what it does not give. Ranges are checked when
    they are submitted, but for `max_tokens`, which have to be `fewest_tokens`."""
    if max_new_tokens is not None and max_new_tokens < fewest_tokens:
        raise InvalidParam(
            "max_tokens", f"max_tokens is {max_new_tokens}; it must be at least {fewest_tokens}"
        )
    seed = body.seed if body.seed is not None else body.sampling_seed
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=_or(body.min_tokens, 0),
        temperature=_or(body.temperature, defaults.temperature),
        top_p=_or(body.top_p, defaults.top_p),
        top_k=_or(body.top_k, defaults.top_k),
        min_p=_or(body.min_p, defaults.min_p),
        frequency_penalty=_or(body.frequency_penalty, defaults.frequency_penalty),
        presence_penalty=_or(body.presence_penalty, defaults.presence_penalty),
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=logit_bias(body.logit_bias),
        seed=seed,
        n=_or(body.n, 1),
        stop=stop_strings(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop=bool(body.no_stop_trim or body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=_or(body.skip_special_tokens, True),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_token_ids=_wanted_ids(body.logprob_token_ids, logprobs),
        grammar=grammar_of(body),
        **extra_sampling(body),
        hidden_states="last" if body.return_hidden_states else None,
    )


def _wanted_ids(ids: list[int] | None, logprobs: int | None) -> tuple[int, ...]:
    if ids and logprobs is None:
        raise ApiError(400, "logprob_token_ids needs logprobs", param="logprob_token_ids")
    return tuple(ids or ())


def _or(value: V | None, default: V) -> V:
    return default if value is None else value


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    """JSON has only text keys: token ids as digits."""
    if not bias:
        return {}
    for key in bias:
        if not _TOKEN_ID.fullmatch(key):
            raise ApiError(
                400,
                f"logit_bias has the key {key[:32]!r}; token ids are needed",
                param="logit_bias",
            )
    return {int(key): value for key, value in bias.items()}


def request_name(request: Request, rid: str | None, request_id: str | None = None) -> str:
    """The name of a request: given in the body, else in the header, else by `RequestMiddleware`."""
    name = rid or request_id
    if name is None:
        return str(request.scope["weft.rid"])
    if not name.isprintable():
        raise ApiError(400, "rid must be printable characters", param="rid")
    rename(name)
    return name


def prompts(
    context: ServerContext,
    request: Request,
    body: SampledRequest,
    ids: Sequence[Sequence[int]],
    params: SamplingParams,
) -> list[Prompt]:
    """One `Prompt` for each list of ids, all with the same parameters (but for where their reasoning begins)."""
    salt = salt_of(context, request, cache_salt(body.cache_salt, body.extra_key))
    tenant = tenant_of(context, request, body.user)
    if body.session_id is not None and body.session_params is not None:
        raise ApiError(400, "session_id and session_params exclude each other", param="session_id")
    session = session_params(context, request, body.session_params, n=params.n * len(ids))
    rid = request_name(request, body.rid, body.request_id)
    return [
        Prompt(
            ids=prompt_ids,
            params=with_reasoning_marks(
                params, context.formats.reasoning, context.tokenizer, prompt_ids
            ),
            rid=rid,
            tenant=tenant,
            user=user_of(context, body.user),
            priority=body.priority or 0,
            cache_salt=salt,
            timeout_ms=timeout_ms(context, request, body.timeout_ms),
            session=session,
            stream_interval=stream_interval(context, body.stream_interval),
        )
        for prompt_ids in ids
    ]


def cache_salt(salt: str | None, extra_key: str | None) -> str:
    """One name for the part of the prefix cache that a request may share. SGLang's `extra_key` does the same as
    `cache_salt`; who gives both shares with those that give both."""
    return f"{salt or ''}\x1f{extra_key}" if extra_key else salt or ""


def timeout_ms(context: ServerContext, request: Request, given: int | None) -> int:
    """After how long a request is to be ended: as its body says, else its header X-Request-Timeout-Ms; 0 for never."""
    if given is None:
        text = request.headers.get("x-request-timeout-ms")
        if text is None:
            return 0
        given = header_number(text, "timeout_ms", "X-Request-Timeout-Ms")
    longest = context.limits.max_timeout_ms
    if given > longest:
        message = f"timeout_ms is {given:,}; 1 to {longest:,} are allowed"
        raise over("max_timeout_ms", message, param="timeout_ms")
    return given


def stream_interval(context: ServerContext, given: int | None) -> int:
    """Tokens of a completion in one event of a stream: as the request says, else the settings."""
    return context.config.stream_interval if given is None else given


def submit(context: ServerContext, prompts: Sequence[Prompt], *, stream: bool) -> Generation:
    """Start generating, if new work is accepted and the request is no larger than it may be.

    The limits hold for what it grows to: a body that is small can ask for very much.
    """
    context.require_accepting()
    num_bias = sum(_num_entries(one.params) * one.params.n for one in prompts)
    num_told = sum(map(num_prompt_logprobs, prompts))
    totals = [
        ("max_completions", "n", "completions", sum(one.params.n for one in prompts)),
        (
            "max_total_tokens",
            "prompt",
            "prompt tokens",
            sum(len(one.ids) * one.params.n for one in prompts),
        ),
        (
            "max_total_stop_len",
            "stop",
            "characters of stop strings and bad words",
            _stop_len(prompts),
        ),
        ("max_total_logit_bias", "logit_bias", "entries of logit_bias and the like", num_bias),
        (
            "max_total_grammar_len",
            "response_format",
            "characters of grammars",
            _grammar_len(prompts),
        ),
        ("max_total_prompt_logprobs", "prompt_logprobs", "log probabilities of prompts", num_told),
        (
            "max_total_hidden_values",
            "return_hidden_states",
            "values of hidden states",
            _num_hidden(context, prompts),
        ),
        (
            "max_total_embed_values",
            "input_embeds",
            "values",
            sum(len(one.vectors) for one in prompts) // 4,
        ),
    ]
    for limit, param, what, total in totals:
        most = getattr(context.limits, limit)
        if total > most:
            raise over(
                limit, f"the request has {total:,} {what} in all; {most:,} are allowed", param=param
            )
    _require_room(context, sum(len(one.vectors) * one.params.n for one in prompts))
    return context.client.submit(prompts, stream=stream)


def _num_hidden(context: ServerContext, prompts: Sequence[Prompt]) -> int:
    num = sum(num_hidden_states(one, context.info.context_length) for one in prompts)
    return num * context.client.engine.hidden_size if num else 0


def _require_room(context: ServerContext, num_bytes: int) -> None:
    """Raise `ApiError` 503 if the engine would keep more input embeddings than it may."""
    limit, held = (
        int(context.limits.max_open_embeds_mb * 1_000_000),
        context.client.num_vector_bytes if num_bytes else 0,
    )
    if held + num_bytes > limit:
        message = f"open requests have {held / 1e6:,.1f} MB of input embeddings, this one {num_bytes / 1e6:,.1f} MB"
        raise over(
            "max_open_embeds_mb",
            f"{message}; {limit / 1e6:g} MB are allowed",
            param="input_embeds",
            status=503,
        )


def _grammar_len(prompts: Sequence[Prompt]) -> int:
    grammars = ((one.params.grammar, one.params.n) for one in prompts)
    return sum(len(grammar.text) * n for grammar, n in grammars if grammar is not None)


def _stop_len(prompts: Sequence[Prompt]) -> int:
    """Of all different sets: each is compiled once."""
    sets = {
        texts
        for one in prompts
        for texts in (one.params.stop, one.params.stop_regex, one.params.bad_words)
    }
    return sum(len(text) for texts in sets for text in texts)


def _num_entries(params: SamplingParams) -> int:
    """Of what each completion of a prompt carries with it."""
    num = len(params.logit_bias) + len(params.allowed_token_ids) + len(params.bad_words)
    return num + sum(one.num_bytes for one in params.processors)


async def encode_texts(
    context: ServerContext,
    texts: Sequence[str],
    *,
    add_special_tokens: bool,
    truncates: bool = False,
) -> list[list[int]]:
    """Ids of each text, off the event loop if there is much to do. Raises `ContextExceeded`, but for those that will be
    truncated."""
    context_len = None if truncates else context.info.context_length
    return await context.tokenizer.encode_async(
        texts, add_special_tokens=add_special_tokens, context_len=context_len
    )


async def encode_mixed(
    context: ServerContext,
    prompts: Sequence[str | list[int]],
    *,
    add_special_tokens: bool,
    truncates: bool = False,
) -> list[list[int]]:
    """Ids of prompts some of which are ids already."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if not texts:
        return [prompt for prompt in prompts if not isinstance(prompt, str)]
    encoded = iter(
        await encode_texts(
            context, texts, add_special_tokens=add_special_tokens, truncates=truncates
        )
    )
    return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]


class Header(NamedTuple):
    """What every chunk of an answer repeats."""

    id: str
    created: int
    model: str


def header(context: ServerContext, prefix: str, rid: str) -> Header:
    """`prefix`: how the ids of such answers begin, with the character before the name of the request."""
    return Header(f"{prefix}{rid}", int(time.time()), context.info.model_name)


class UsageCount:
    """Tokens of one answer, counted as its deltas pass. A prompt counts once, however many completions it has.

    With the history of a session a prompt is longer than what was sent; that is known when its completion has ended.
    """

    def __init__(self, prompt_lens: Sequence[int], n: int) -> None:
        self._n = n
        self._prompt_lens = list(prompt_lens)
        self._cached_tokens = 0  # known when a completion has ended
        self._num_tokens = [0] * (len(prompt_lens) * n)

    def add(self, delta: Delta) -> None:
        self._num_tokens[delta.choice] = delta.num_tokens
        if delta.end is not None and delta.choice % self._n == 0:
            self._cached_tokens += delta.end.cached_tokens
            self._prompt_lens[delta.choice // self._n] = delta.end.prompt_tokens

    def usage(self) -> Usage:
        prompt_tokens, completion_tokens = sum(self._prompt_lens), sum(self._num_tokens)
        return Usage(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            PromptTokensDetails(self._cached_tokens),
        )


def reasoning_details(
    tokenizer: Tokenizer, outputs: Sequence[ParsedOutput]
) -> CompletionTokensDetails:
    """How many tokens were reasoning. Its marks are not among them."""
    texts = ["".join(output.reasoning_text) for output in outputs]
    return CompletionTokensDetails(
        sum(map(len, tokenizer.encode_all(texts, add_special_tokens=False)))
    )


def chat_logprobs(
    tokenizer: Tokenizer, delta: Delta, *, as_ids: bool = False, wanted: Sequence[int] = ()
) -> ChatLogprobs:
    """With the bytes of each token, because a token need not be a whole character. Those `wanted` stand at the end."""

    def entry(token: int, logprob: float) -> TopLogprob:
        text = _id_name(token) if as_ids else tokenizer.token_text(token)
        return TopLogprob(text, finite(logprob), list(tokenizer.token_bytes(token)))

    content = []
    for token, found in zip(delta.token_ids, delta.logprobs, strict=False):
        own = entry(token, found.logprob)
        top = [entry(*pair) for pair in _told(found, wanted)]
        content.append(TokenLogprob(own.token, own.logprob, own.bytes, top))
    return ChatLogprobs(content)


class Places:
    """Where in the text of one answer each token begins; half a character stands where the character begins."""

    def __init__(self, detokenizer: Detokenizer, offset: int) -> None:
        """`offset`: characters before the first token."""
        self._detokenizer = detokenizer
        self._offset = offset

    def next(self, token: int) -> int:
        """The place of the next token."""
        place = self._offset
        self._offset += len(self._detokenizer.push(token))
        return place


def completion_logprobs(
    delta: Delta, places: Places, name_of: TokenName, wanted: Sequence[int] = ()
) -> CompletionLogprobs:
    """`places` are those of the completion. `wanted` are told beside the likeliest."""
    result = CompletionLogprobs([], [], [], [])
    for token, found in zip(delta.token_ids, delta.logprobs, strict=False):
        name = name_of(token)
        result.tokens.append(name)
        result.token_logprobs.append(finite(found.logprob))
        result.top_logprobs.append(_top(name_of, found, name, wanted))
        result.text_offset.append(places.next(token))
    return result


def token_names(tokenizer: Tokenizer, *, as_ids: bool) -> TokenName:
    """How tokens are called: by their text, or, as vLLM writes it, by "token_id:17"."""
    return _id_name if as_ids else partial(token_name, tokenizer)


def _id_name(token: int) -> str:
    return f"token_id:{token}"


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; as OpenAI writes it ("bytes:\\xe4") if it is no text by itself, so that names stay different."""
    piece = tokenizer.token_bytes(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _told(found: TokenLogprobs, wanted: Sequence[int]) -> list[tuple[int, float]]:
    """The likeliest tokens of a place, and behind them those of `wanted` that are not among them."""
    top = dict(zip(found.top_ids, found.top_logprobs, strict=True))
    return list((top | dict(zip(wanted, found.id_logprobs, strict=True))).items())


def _top(
    name_of: TokenName, found: TokenLogprobs, name: str, wanted: Sequence[int]
) -> dict[str, float]:
    """The likeliest tokens, those that are wanted, and the one that was sampled."""
    top = {name_of(token): finite(logprob) for token, logprob in _told(found, wanted)}
    top.setdefault(name, finite(found.logprob))
    return top


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)

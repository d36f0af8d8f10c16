"""Limits on requests, and the refusals of requests that exceed one.

`config.limits.Limits` bounds the fields of a body, on every route (`BOUNDS`), the sums over the
prompts of a request, which are known after tokenizing (`TOTALS`), and the head of a request. This
module also checks the memory of a process with a limited address space (`ulimit -v`): work that
might not fit is refused before it begins, because a library that runs out of memory ends the
process. Limits on connections and times are in `server/http/protocol.py`. This module does not know
what a field means.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from starlette.types import Scope

from weft.client.aux_outputs import num_hidden_states, num_prompt_logprobs
from weft.client.requests import media_bytes
from weft.config.limits import Limits
from weft.config.numbers import INT64, shown
from weft.messages.requests import GenerateRequest
from weft.server.context import Readiness, ServerContext
from weft.server.errors import NOT_BEGUN, ApiError, over

HEALTH_TIMEOUT_S = 20.0
SCRAPE_TIMEOUT_S = 0.5  # for fresh engine numbers when a client requests metrics


# ---- fields of a body


class Bound(NamedTuple):
    """One limit, and the fields of bodies that it bounds."""

    limit: str  # field of `Limits`
    fields: tuple[str, ...]
    size: Callable[[Any], int]  # size of a field's value
    what: str  # the unit, for the message

    @property
    def keywords(self) -> Mapping[str, str]:
        """The keyword of JSON Schema that says the limit, by the type of the value; empty if none
        can."""
        return _KEYWORDS.get(self.size, {})

    @property
    def is_of_items(self) -> bool:
        """Whether the limit holds for each item of a list."""
        return self.size in (_longest, _largest)


def _num_prompts(value: Any) -> int:
    if not isinstance(value, list) or not value or isinstance(value[0], int):
        return 1
    return len(value)


def _num_items(value: Any) -> int:
    return len(value) if isinstance(value, list) else 1


def _longest(value: Any) -> int:
    """Characters of a text, or of the longest text of a list."""
    if isinstance(value, list):
        return max(map(len, value), default=0)
    return len(value)


def _largest(value: Any) -> int:
    """The number, or the largest of a list; true and false count as 0."""
    if isinstance(value, list):
        return max(map(int, value), default=0)
    return 0 if value is True else int(value)


def _longest_ids(value: Any) -> int:
    """Length of a list of ids, or of the longest of several lists."""
    lens = [len(one) for one in value if isinstance(one, list)]
    return max(lens, default=len(value))


def _num_ids(value: Any) -> int:
    num = 0
    for one in value:
        num += len(one) if isinstance(one, list) else 1
    return num


PROMPTS = ("prompt", "text", "input", "input_ids", "text_1", "text_2", "queries", "documents")
STOPS = ("stop", "stop_sequences", "stop_regex")
LOGPROBS = ("logprobs", "top_logprobs", "top_logprobs_num", "prompt_logprobs")

BOUNDS = (
    Bound("max_prompts", PROMPTS, _num_prompts, "prompts"),
    Bound("max_n", ("n", "best_of"), _largest, "completions of a prompt"),
    Bound("max_messages", ("messages",), len, "messages"),
    Bound("max_messages", ("items",), _num_items, "items"),  # input of a response
    Bound("max_tools", ("tools",), len, "tools"),
    Bound("max_stop_strings", STOPS, _num_items, "stop strings"),
    Bound("max_stop_len", (*STOPS, "bad_words"), _longest, "characters in a string"),
    Bound("max_allowed_token_ids", ("allowed_token_ids",), len, "ids"),
    Bound("max_bad_words", ("bad_words",), len, "words"),
    Bound("max_processors", ("custom_logit_processor",), _num_items, "logit processors"),
    Bound("max_stop_token_ids", ("stop_token_ids",), len, "ids"),
    Bound("max_logit_bias", ("logit_bias",), len, "entries"),
    Bound("max_logprobs", LOGPROBS, _largest, "likeliest tokens"),
    Bound("max_logprob_token_ids", ("token_ids_logprob", "label_token_ids"), _longest_ids, "ids"),
    Bound("max_detokenized", ("tokens",), _num_ids, "ids"),
    Bound("max_rid_len", ("rid", "request_id"), _longest, "characters"),
    Bound("max_salt_len", ("cache_salt", "extra_key"), len, "characters"),
    Bound("max_timeout_ms", ("timeout_ms", "ttft_ms"), _largest, "milliseconds"),
)


_KEYWORDS: dict[Callable[[Any], int], Mapping[str, str]] = {
    len: {
        "array": "maxItems",
        "string": "maxLength",
        "object": "maxProperties",
    },
    _num_items: {"array": "maxItems"},
    _longest: {"string": "maxLength"},
    _largest: {"integer": "maximum"},
}


def _by_field() -> dict[str, list[Bound]]:
    found: dict[str, list[Bound]] = {}
    for bound in BOUNDS:
        for name in bound.fields:
            found.setdefault(name, []).append(bound)
    return found


_BY_FIELD = _by_field()


def bounds_of(field: str) -> Sequence[Bound]:
    """The limits of a field of bodies."""
    return _BY_FIELD.get(field, ())


# Fields with a bound whose values also contain free-form values.
_STRUCTURED = frozenset({"messages", "items", "tools", "custom_logit_processor"})


def check_body(limits: Limits, body: msgspec.Struct) -> None:
    """Raise `ApiError` for the first field of `body`, or of a struct inside it, that is too
    large."""
    values = msgspec.structs.astuple(body)
    fields = zip(body.__struct_fields__, body.__struct_encode_fields__, values, strict=True)
    for name, shown_name, value in fields:
        if value is None or isinstance(value, bool):
            continue
        for bound in _BY_FIELD.get(name, ()):
            size = bound.size(value)
            most = getattr(limits, bound.limit)
            if size > most:
                counted = f"{size:,}" if abs(size) <= INT64 else shown(size)
                found = f"has {counted} {bound.what}"
                if bound.size is _largest:
                    found = f"is {counted}"
                message = f"{shown_name} {found}; at most {most:,} are allowed"
                raise over(bound.limit, message, param=shown_name)
        if isinstance(value, str | int | float):
            continue
        if name not in _BY_FIELD or name in _STRUCTURED:
            _check_inside(limits, shown_name, value)


def _check_inside(limits: Limits, name: str, value: Any) -> None:
    """Check structs like the body, and free-form values for their depth and number."""
    if isinstance(value, msgspec.Struct):
        check_body(limits, value)
    elif isinstance(value, dict):
        _check_free_form(limits, name, value)
    elif isinstance(value, list) and value:
        if isinstance(value[0], msgspec.Struct):
            for one in value:
                check_body(limits, one)
        else:
            _check_free_form(limits, name, value)


def _check_free_form(limits: Limits, name: str, value: Any) -> None:
    """Check level by level, so that neither depth nor number can overrun this function."""
    level = [value]
    depth = 0
    count = 0
    while level:
        depth += 1
        count += sum(map(len, level))
        if depth > limits.max_json_depth:
            message = f"{name} is nested deeper than {limits.max_json_depth} levels"
            raise over("max_json_depth", message, param=name)
        if count > limits.max_json_values:
            message = f"{name} has more than {limits.max_json_values:,} values"
            raise over("max_json_values", message, param=name)
        deeper: list[Any] = []
        for one in level:
            inner = one.values() if isinstance(one, dict) else one
            deeper += [value for value in inner if isinstance(value, dict | list)]
        level = deeper


# ---- sums over the prompts of a request


class Total(NamedTuple):
    """One limit on a sum over the prompts of a request.

    A small body can request a large amount of work, so these limits apply to the expanded request.
    """

    limit: str  # field of `Limits`
    param: str  # field of the body that the error names
    what: str  # the unit, for the message
    size: Callable[[ServerContext, Sequence[GenerateRequest]], int]  # of the prompts that use it
    # Fields of `SamplingParams`, or "vectors"; a request that sets one of them uses the feature.
    asked_by: tuple[str, ...]


def _stop_len(context: ServerContext, requests: Sequence[GenerateRequest]) -> int:
    """Characters of all different sets: each set is compiled once."""
    sets: set[tuple[str, ...]] = set()
    for request in requests:
        sampling = request.sampling
        sets.update((sampling.stop, sampling.stop_regex, sampling.bad_words))
    return sum(len(text) for texts in sets for text in texts)


def _num_entries(context: ServerContext, requests: Sequence[GenerateRequest]) -> int:
    """Entries and bytes that every completion carries."""
    total = 0
    for request in requests:
        params = request.sampling
        num = len(params.logit_bias) + len(params.allowed_token_ids) + len(params.bad_words)
        for processor in params.processors:
            num += processor.num_bytes
        total += num * params.n
    return total


def _grammar_len(context: ServerContext, requests: Sequence[GenerateRequest]) -> int:
    total = 0
    for request in requests:
        grammar = request.sampling.grammar
        if grammar is not None:
            total += len(grammar.text) * request.sampling.n
    return total


def _num_prompt_logprobs(context: ServerContext, requests: Sequence[GenerateRequest]) -> int:
    return sum(map(num_prompt_logprobs, requests))


def _num_hidden_values(context: ServerContext, requests: Sequence[GenerateRequest]) -> int:
    num = sum(num_hidden_states(request, context.info.context_length) for request in requests)
    return num * context.client.engine.hidden_size if num else 0


def _num_embed_values(context: ServerContext, requests: Sequence[GenerateRequest]) -> int:
    return sum(len(request.vectors) for request in requests) // 4  # bytes of a float32


TOTALS = (
    Total(
        "max_total_stop_len",
        "stop",
        "characters of stop strings and bad words",
        _stop_len,
        ("stop", "stop_regex", "bad_words"),
    ),
    Total(
        "max_total_logit_bias",
        "logit_bias",
        "entries of logit_bias and the like",
        _num_entries,
        ("logit_bias", "allowed_token_ids", "bad_words", "processors"),
    ),
    Total(
        "max_total_grammar_len",
        "response_format",
        "characters of grammars",
        _grammar_len,
        ("grammar",),
    ),
    Total(
        "max_total_prompt_logprobs",
        "prompt_logprobs",
        "log probabilities of prompts",
        _num_prompt_logprobs,
        ("prompt_logprobs",),
    ),
    Total(
        "max_total_hidden_values",
        "return_hidden_states",
        "values of hidden states",
        _num_hidden_values,
        ("hidden_states",),
    ),
    Total("max_total_embed_values", "input_embeds", "values", _num_embed_values, ("vectors",)),
)
_NOTHING: tuple[Any, ...] = (None, (), {}, b"")


def check_size(context: ServerContext, lens: Sequence[int], num_each: Sequence[int]) -> None:
    """Raise `ApiError` for too many completions or prompt tokens in all.

    `lens`: tokens of each prompt; `num_each`: completions of each.
    """
    limits = context.limits
    num_completions = sum(num_each)
    num_tokens = sum(map(mul, lens, num_each))
    if num_completions > limits.max_completions:
        raise _exceeded(limits, "max_completions", "n", num_completions, "completions")
    if num_tokens > limits.max_request_tokens:
        raise _exceeded(limits, "max_request_tokens", "prompt", num_tokens, "prompt tokens")


def check_totals(context: ServerContext, requests: Sequence[GenerateRequest]) -> None:
    """Raise `ApiError` for the first limit on a whole request that `requests` exceed."""
    limits = context.limits
    for total in TOTALS:
        asking: list[GenerateRequest] = []
        for request in requests:
            for name in total.asked_by:
                holder = request if name == "vectors" else request.sampling
                if getattr(holder, name) not in _NOTHING:
                    asking.append(request)
                    break
        if not asking:
            continue
        size = total.size(context, asking)
        if size > getattr(limits, total.limit):
            raise _exceeded(limits, total.limit, total.param, size, total.what)


def _exceeded(limits: Limits, limit: str, param: str, size: int, what: str) -> ApiError:
    most = getattr(limits, limit)
    message = f"the request has {size:,} {what} in all; {most:,} are allowed"
    return over(limit, message, param=param)


def require_embeds_room(context: ServerContext, requests: Sequence[GenerateRequest]) -> None:
    """Raise `ApiError` 503 if the engine would hold more input embeddings and values of images,
    videos and sounds than `max_open_embeds_mb`."""
    num_bytes = 0
    for request in requests:
        num_bytes += len(request.vectors) * request.sampling.n + media_bytes(request)
    limit = int(context.limits.max_open_embeds_mb * 1_000_000)
    open_bytes = context.client.num_embed_bytes if num_bytes else 0
    if open_bytes + num_bytes > limit:
        message = (
            f"open requests have {open_bytes / 1e6:,.1f} MB of input embeddings and prepared "
            f"images, this one {num_bytes / 1e6:,.1f} MB; {limit / 1e6:g} MB are allowed"
        )
        raise over("max_open_embeds_mb", message, status=503)


# ---- the server


def require_accepting(readiness: Readiness) -> None:
    """Raise `ApiError` 503 if the server accepts no new work."""
    if not readiness.accepting:
        raise refusal_of(readiness)


def refusal_of(readiness: Readiness) -> ApiError:
    """The answer to a request while the server accepts no new work."""
    what = "shutting down" if readiness.draining else "not ready yet"
    headers = {"retry-after": "1", NOT_BEGUN: "1"}
    return ApiError(503, f"the server is {what}", headers=headers)


# ---- the head of a request


def head_refusal(limits: Limits, scope: Scope) -> ApiError | None:
    """The reason to refuse the head of a request that is too large, or None."""
    url_len = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    if url_len > limits.max_url_bytes:
        message = f"the URL is longer than {limits.max_url_bytes:,} bytes"
        return over("max_url_bytes", message, status=414)
    headers = scope["headers"]
    if len(headers) > limits.max_headers:
        message = f"there are more than {limits.max_headers} headers"
        return over("max_headers", message, status=431)
    headers_len = 0
    for name, value in headers:
        headers_len += len(name) + len(value)
    if headers_len > limits.max_header_bytes:
        message = f"the headers are larger than {limits.max_header_bytes:,} bytes"
        return over("max_header_bytes", message, status=431)
    return None


# ---- address space

# A server needs this beyond what is loaded: for threads, and for the allocator's memory per thread.
LEAST_BYTES = 1_000_000_000
RESERVE_BYTES = 128_000_000  # for open requests, and for one request of common size
BYTES_PER_BODY_BYTE = 16  # text, values, tokens and their offsets of one body
STATM = Path("/proc/self/statm")


def spare_bytes() -> float:
    """Bytes of address space that this process may still take.

    Infinite if the address space is not limited or the limit is unknown. Limits from outside the
    process, such as a container's, are not visible here.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return math.inf
    try:
        pages = int(STATM.read_bytes().split()[0])
    except OSError:
        return math.inf
    return float(limit - pages * os.sysconf("SC_PAGE_SIZE"))


def require_room(body_len: int) -> None:
    """Raise `ApiError` 503 unless there is memory to process a body of `body_len` bytes."""
    spare = spare_bytes()
    if spare < RESERVE_BYTES + BYTES_PER_BODY_BYTE * body_len:
        left = f"{spare / 1e6:.0f} MB are left (ulimit -v)"
        message = f"the server has no memory for a body of {body_len:,} bytes: {left}"
        raise ApiError(503, message, headers={"retry-after": "1"})

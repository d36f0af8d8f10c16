"""Holds a decoded body against `config.limits.Limits`, before anything is made of it.

One table says which fields of any body have which limit; whatever route reads a body (`body.read_json`), it is checked
here. Limits on sums over prompts, which are known only after tokenizing, are checked in `openai/translate.py`; those on
bytes and times in `edge.py`, `protocol.py` and `body.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from weft.config.limits import Limits
from weft.config.numbers import INT64, shown
from weft.server.errors import ApiError

HEALTH_TIMEOUT_S = 20.0
SCRAPE_TIMEOUT_S = 0.5  # for fresh numbers of the engine when metrics are asked for


class Bound(NamedTuple):
    """What one limit means for some fields of a body."""

    limit: str  # field of `Limits`
    fields: tuple[str, ...]
    size: Callable[[Any], int]  # of a field's value
    what: str  # the unit, for the message


def _num_prompts(value: Any) -> int:
    return len(value) if isinstance(value, list) and value and not isinstance(value[0], int) else 1


def _num_items(value: Any) -> int:
    return len(value) if isinstance(value, list) else 1


def _num_strings(value: Any) -> int:
    return len(value) if isinstance(value, list) else 1


def _longest(value: Any) -> int:
    return max(map(len, value), default=0) if isinstance(value, list) else len(value)


def _largest(value: Any) -> int:
    """Of one number or a list of them; true and false ask for no number."""
    return (
        max((int(one) for one in value), default=0)
        if isinstance(value, list)
        else int(value is not True and value)
    )


def _longest_ids(value: Any) -> int:
    """Of a list of ids, or of the longest of several."""
    return max((len(one) for one in value if isinstance(one, list)), default=len(value))


def _num_ids(value: Any) -> int:
    return sum(len(one) if isinstance(one, list) else 1 for one in value)


PROMPTS = ("prompt", "text", "input", "input_ids", "text_1", "text_2", "queries", "documents")

BOUNDS = (
    Bound("max_prompts", PROMPTS, _num_prompts, "prompts"),
    Bound("max_n", ("n", "best_of"), _largest, "completions of a prompt"),
    Bound("max_messages", ("messages",), len, "messages"),
    Bound("max_messages", ("items",), _num_items, "items"),  # the input of a response
    Bound("max_tools", ("tools",), len, "tools"),
    Bound(
        "max_stop_strings", ("stop", "stop_sequences", "stop_regex"), _num_strings, "stop strings"
    ),
    Bound(
        "max_stop_len",
        ("stop", "stop_sequences", "stop_regex", "bad_words"),
        _longest,
        "characters in a string",
    ),
    Bound("max_allowed_token_ids", ("allowed_token_ids",), len, "ids"),
    Bound("max_bad_words", ("bad_words",), len, "words"),
    Bound("max_processors", ("custom_logit_processor",), _num_items, "logit processors"),
    Bound("max_stop_token_ids", ("stop_token_ids",), len, "ids"),
    Bound("max_logit_bias", ("logit_bias",), len, "entries"),
    Bound(
        *("max_logprobs", ("logprobs", "top_logprobs", "top_logprobs_num", "prompt_logprobs")),
        *(_largest, "likeliest tokens"),
    ),
    Bound("max_logprob_token_ids", ("token_ids_logprob", "label_token_ids"), _longest_ids, "ids"),
    Bound("max_detokenized", ("tokens",), _num_ids, "ids"),
    Bound("max_rid_len", ("rid", "request_id"), _longest, "characters"),
    Bound("max_salt_len", ("cache_salt", "extra_key"), len, "characters"),
    Bound("max_timeout_ms", ("timeout_ms",), _largest, "milliseconds"),
)
_BY_FIELD = {
    name: tuple(bound for bound in BOUNDS if name in bound.fields)
    for name in sorted({name for bound in BOUNDS for name in bound.fields})
}
# with a bound, and yet inside of them free-form values:
_STRUCTURED = frozenset({"messages", "items", "tools", "custom_logit_processor"})


def check_body(limits: Limits, body: msgspec.Struct) -> None:
    """Raise `ApiError` for the first field of `body`, or of a struct in it, that is larger than it may be."""
    fields = zip(
        body.__struct_fields__,
        body.__struct_encode_fields__,
        msgspec.structs.astuple(body),
        strict=True,
    )
    for name, told, value in fields:
        if value is None or isinstance(value, bool):
            continue
        for bound in _BY_FIELD.get(name, ()):
            size, most = bound.size(value), getattr(limits, bound.limit)
            if size > most:
                counted = f"{size:,}" if abs(size) <= INT64 else shown(size)
                message = f"{told} has {counted} {bound.what}; at most {most:,} are allowed"
                raise over(bound.limit, message, param=told)
        if name not in _BY_FIELD or name in _STRUCTURED:
            _check_inside(limits, told, value)


def over(limit: str, message: str, *, param: str | None = None, status: int = 400) -> ApiError:
    """A refusal that is counted under the name of its limit."""
    return ApiError(status, message, param=param, limit=limit)


def _check_inside(limits: Limits, name: str, value: Any) -> None:
    """Structs are checked like the body, free-form values for their depth and number."""
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
    """Level by level, so that neither depth nor number can overrun this function."""
    level, depth, count = [value], 0, 0
    while level:
        depth += 1
        count += sum(map(len, level))
        if depth > limits.max_json_depth:
            raise over(
                "max_json_depth",
                f"{name} is nested deeper than {limits.max_json_depth} levels",
                param=name,
            )
        if count > limits.max_json_values:
            raise over(
                "max_json_values",
                f"{name} has more than {limits.max_json_values:,} values",
                param=name,
            )
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]

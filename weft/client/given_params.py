"""Sampling parameters as Python programs give them: a text or a list in the place of a tuple.

Requests over HTTP have the right types when they arrive. This module checks no ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from weft.messages.sampling import Grammar, InvalidParam, SamplingParams

TEXTS = ("stop", "stop_regex", "bad_words")
OTHERS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "processors")


def with_tuples(params: SamplingParams) -> SamplingParams:
    """The parameters with tuples in the place of lists, and of a single text.

    Raises `InvalidParam` for other types of these fields, of `logit_bias` and of `grammar`.
    """
    changes: dict[str, Any] = {}
    for name in (*TEXTS, *OTHERS):
        value = getattr(params, name)
        if isinstance(value, tuple):
            continue
        if isinstance(value, str) and name in TEXTS:
            changes[name] = (value,)
        elif isinstance(value, list):
            changes[name] = tuple(value)
        else:
            raise _wrong(name, value, "a tuple or a list")
    for name in TEXTS:
        for text in changes.get(name, getattr(params, name)):
            if not isinstance(text, str):
                raise _wrong(f"an entry of {name}", text, "a text")
    if not isinstance(params.logit_bias, Mapping):
        raise _wrong("logit_bias", params.logit_bias, "a dictionary of token ids")
    if params.grammar is not None and not isinstance(params.grammar, Grammar):
        raise _wrong("grammar", params.grammar, "weft.Grammar(kind, text)")
    return msgspec.structs.replace(params, **changes)


def _wrong(name: str, value: Any, expected: str) -> InvalidParam:
    message = f"{name} is a {type(value).__name__}; {expected} is expected"
    return InvalidParam(name, message)

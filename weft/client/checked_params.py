"""Sampling parameters as Python programs give them: a text or a list instead of a tuple.

Requests over HTTP have the right types when they arrive. This module checks no ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, get_args

import msgspec

from weft.client.checked_args import require_switch, require_text, wrong_value
from weft.messages.sampling import (
    NUMERIC,
    Grammar,
    GrammarKind,
    HiddenStatesOf,
    Processor,
    SamplingParams,
    ThinkingMarks,
)

TEXTS = ("stop", "stop_regex", "bad_words")
IDS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")
OTHERS = ("bad_word_ids", "processors")
SWITCHES = ("include_stop", "ignore_eos", "skip_special_tokens")
PARAMS = "weft.SamplingParams"


def with_tuples(params: SamplingParams) -> SamplingParams:
    """The parameters with tuples instead of lists, and of a single text, and with Python's
    numbers instead of numpy's.

    Raises `InvalidParam` for other types, naming the field.
    """
    if not isinstance(params, SamplingParams):
        raise wrong_value("params", params, PARAMS)
    changes: dict[str, Any] = {}
    for name in (*TEXTS, *IDS, *OTHERS):
        value = getattr(params, name)
        found = _as_tuple(name, value)
        if found is not value:
            changes[name] = found
    for name in NUMERIC:
        value = getattr(params, name)
        found = _plain_number(value)
        if found is not value:
            changes[name] = found
    if changes:
        params = msgspec.structs.replace(params, **changes)
    _check_fields(params)
    return params


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return value
    if isinstance(value, str) and name in TEXTS:
        return (value,)
    if isinstance(value, list):
        return tuple(value)
    raise wrong_value(name, value, "a tuple or a list")


def _plain_number(value: Any) -> Any:
    """Python's number for another library's number; other values as they are."""
    if value is None or type(value) in (int, float, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return value


def _check_fields(params: SamplingParams) -> None:
    for name in TEXTS:
        for index, text in enumerate(getattr(params, name)):
            require_text(f"{name}[{index}]", text)
    for name in SWITCHES:
        require_switch(name, getattr(params, name))
    for index, ids in enumerate(params.bad_word_ids):
        if not isinstance(ids, tuple | list):
            raise wrong_value(f"bad_word_ids[{index}]", ids, "a tuple or a list of token ids")
    for index, processor in enumerate(params.processors):
        _check_processor(f"processors[{index}]", processor)
    if not isinstance(params.logit_bias, Mapping):
        raise wrong_value("logit_bias", params.logit_bias, "a dictionary of token ids")
    if params.grammar is not None:
        _check_grammar(params.grammar)
    if params.thinking_marks is not None:
        _check_marks("thinking_marks", params.thinking_marks)
    if params.hidden_states is not None:
        _require_word("hidden_states", params.hidden_states, get_args(HiddenStatesOf))


def _check_processor(name: str, processor: Any) -> None:
    if not isinstance(processor, Processor):
        raise wrong_value(name, processor, "weft.Processor(name, params)")
    require_text(f"{name}.name", processor.name)
    if not isinstance(processor.params, dict):
        raise wrong_value(f"{name}.params", processor.params, "a dictionary")


def _check_grammar(grammar: Any) -> None:
    if not isinstance(grammar, Grammar):
        raise wrong_value("grammar", grammar, "weft.Grammar(kind, text)")
    _require_word("grammar.kind", grammar.kind, get_args(GrammarKind))
    require_text("grammar.text", grammar.text)
    require_switch("grammar.strict", grammar.strict)
    if grammar.behind is not None:
        _check_marks("grammar.behind", grammar.behind)


def _check_marks(name: str, marks: Any) -> None:
    if not isinstance(marks, ThinkingMarks):
        raise wrong_value(name, marks, "ThinkingMarks(begin, end, is_open)")
    for part in ("begin", "end"):
        ids = getattr(marks, part)
        if not isinstance(ids, tuple):
            raise wrong_value(f"{name}.{part}", ids, "a tuple of token ids")
    require_switch(f"{name}.is_open", marks.is_open)


def _require_word(name: str, value: Any, words: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in words:
        raise wrong_value(name, value, f"one of {', '.join(words)}")

"""The fields of a request that control sampling, with one table of their spellings.

OpenAI, vLLM, SGLang, llama.cpp and Ollama have different names for the same parameters. A body
declares the names of its API; `SPELLINGS` maps each name to its parameter. Only fields that the
client sent are read, so unused fields cost nothing. Lengths and log probabilities are not here:
each API has its own rules for them. This module knows nothing about prompts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from weft.json_types import JsonObject
from weft.messages.sampling import Grammar, Processor, SamplingParams
from weft.messages.wrong_field import converted_field
from weft.server.errors import ApiError
from weft.server.fields.grammar import GRAMMAR_FIELDS, grammar_of

MAX_SHOWN = 64  # characters of a wrong value that a message repeats
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,127}")
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_NO_CODE = (
    "code in a request is never run. Give the name of a logit processor that the server was "
    "started with (--logit-processors, or an installed package), and its parameters in "
    "custom_params"
)


class ExtraSamplingFields(msgspec.Struct, kw_only=True):
    """Sampling fields other than numbers, in the spellings of vLLM and SGLang, on all routes."""

    # Names of further fields that generating routes serve, and this one refuses.
    refused: ClassVar[frozenset[str]] = frozenset()
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stop_regex: str | list[str] | None = None
    # The next three fields have the same meaning. The names are weft's, vLLM's and SGLang's.
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    max_thinking_tokens: int | None = None
    # A name, or a list of names and of {"name", "params"}.
    custom_logit_processor: Any = None
    # Parameters of a processor that is given by name only.
    custom_params: Any = None
    # vLLM's. Refused: it names code.
    logits_processors: Any = None


class CommonSamplingFields(ExtraSamplingFields, kw_only=True):
    """Fields that OpenAI's and SGLang's APIs spell the same."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stream_interval: int | None = None  # tokens per event; larger values cost less
    # Constraints of the answer (`server/fields/grammar.py`):
    structured_outputs: JsonObject | None = None
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    structural_tag: Any = None


def require_one_answer(n: int | None) -> None:
    """Raise `ApiError` for `n` above 1, in APIs whose answer is one message."""
    if n not in (None, 1):
        raise ApiError(400, f"n is {n}; only 1 is allowed: the answer is one message", param="n")


class Spelling(NamedTuple):
    """One sampling parameter, and its names in bodies."""

    param: str  # field of `SamplingParams`
    fields: tuple[str, ...]  # names in bodies; if several are given, the one declared first counts
    read: Callable[[Any, Any], Any] | None = None  # (body, value) -> parameter; None: value


class SpelledField(NamedTuple):
    """A field of a body, and its parameter."""

    name: str
    spelling: Spelling


def _texts(
    body: Any,
    value: str | list[str],
) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(value)


def _ids(body: Any, value: list[int]) -> tuple[int, ...]:
    return tuple(value)


def _logit_bias(
    body: Any,
    bias: dict[str, float],
) -> dict[int, float]:
    """Convert the keys to token ids: JSON has only text keys, so ids are digits."""
    found: dict[int, float] = {}
    for key, value in bias.items():
        if not _TOKEN_ID.fullmatch(key):
            message = f"logit_bias has the key {key[:32]!r}; token ids are needed"
            raise ApiError(400, message, param="logit_bias")
        found[int(key)] = value
    return found


def _includes_stop(body: Any, value: bool) -> bool:
    """True if one of the two fields is true."""
    values = [getattr(body, name, None) for name in _INCLUDES_STOP]
    return any(values)


def _grammar(body: Any, value: Any) -> Grammar | None:
    return grammar_of(body)


def _allowed_token_ids(body: Any, value: list[int]) -> tuple[int, ...]:
    if not value:
        message = "allowed_token_ids is empty: no token could be generated"
        raise ApiError(400, message, param="allowed_token_ids")
    return tuple(value)


def _processors(body: Any, value: Any) -> tuple[Processor, ...]:
    return processors(body)


_INCLUDES_STOP = ("no_stop_trim", "include_stop_str_in_output")
_THINKING_BUDGET = ("thinking_budget", "thinking_token_budget", "max_thinking_tokens")

SPELLINGS = (
    Spelling("max_new_tokens", ("max_new_tokens",)),
    Spelling("min_new_tokens", ("min_new_tokens", "min_tokens")),
    Spelling("temperature", ("temperature",)),
    Spelling("top_p", ("top_p",)),
    Spelling("top_k", ("top_k",)),
    Spelling("min_p", ("min_p",)),
    Spelling("frequency_penalty", ("frequency_penalty",)),
    Spelling("presence_penalty", ("presence_penalty",)),
    Spelling("repetition_penalty", ("repetition_penalty", "repeat_penalty")),
    Spelling("logit_bias", ("logit_bias",), _logit_bias),
    Spelling("seed", ("seed", "sampling_seed")),
    Spelling("n", ("n",)),
    Spelling("stop", ("stop", "stop_sequences"), _texts),
    Spelling("stop_token_ids", ("stop_token_ids",), _ids),
    Spelling("include_stop", _INCLUDES_STOP, _includes_stop),
    Spelling("ignore_eos", ("ignore_eos",)),
    Spelling("skip_special_tokens", ("skip_special_tokens",)),
    Spelling("grammar", GRAMMAR_FIELDS, _grammar),
    Spelling("allowed_token_ids", ("allowed_token_ids",), _allowed_token_ids),
    Spelling("bad_words", ("bad_words",), _texts),
    Spelling("stop_regex", ("stop_regex",), _texts),
    Spelling("thinking_budget", _THINKING_BUDGET),
    Spelling(
        "processors",
        ("custom_logit_processor", "custom_params", "logits_processors"),
        _processors,
    ),
)


def sampling_params(
    body: msgspec.Struct, defaults: SamplingParams, **others: Any
) -> SamplingParams:
    """The fields that a client sent, as sampling parameters; other parameters are as in `defaults`.

    `others`: parameters that the API reads itself; they override. Raises `ApiError` for a value of
    the wrong form. Ranges are checked when the request is submitted.
    """
    values: JsonObject = {}
    for name, spelling in _spellings_of(type(body)):
        value = getattr(body, name)
        if value is None or spelling.param in values:
            continue
        if spelling.read is not None:
            value = spelling.read(body, value)
        values[spelling.param] = value
    values.update(others)
    return msgspec.structs.replace(defaults, **values)


def copy_sampling(source: msgspec.Struct, target: msgspec.Struct) -> None:
    """Copy the sampling fields of `source` to `target`, under `target`'s names."""
    # If `target` does not have the name, use the first of its names for the parameter.
    own_names = target.__struct_fields__
    names: dict[str, str] = {}
    for name, spelling in _spellings_of(type(target)):
        names.setdefault(spelling.param, name)
    for name, spelling in _spellings_of(type(source)):
        value = getattr(source, name)
        if value is not None:
            setattr(target, name if name in own_names else names[spelling.param], value)


@cache
def _spellings_of(body: type[msgspec.Struct]) -> tuple[SpelledField, ...]:
    """The sampling fields of a body, in the order of the table, then of the body."""
    found: list[SpelledField] = []
    for spelling in SPELLINGS:
        for name in body.__struct_fields__:
            if name in spelling.fields:
                field = SpelledField(name, spelling)
                found.append(field)
    return tuple(found)


class NamedProcessor(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A logit processor with its own parameters."""

    name: str
    params: JsonObject | None = None


def processors(body: ExtraSamplingFields) -> tuple[Processor, ...]:
    """The logit processors that a request names. Raises `ApiError`."""
    if body.logits_processors:
        message = f"logits_processors: {_NO_CODE}"
        raise ApiError(400, message, param="logits_processors")
    named = body.custom_logit_processor
    params = body.custom_params
    if not named:
        if params:
            message = "custom_params needs custom_logit_processor"
            raise ApiError(400, message, param="custom_params")
        return ()
    entries = named
    if not isinstance(named, list):
        entries = [named]
    found = [_processor(entry) for entry in entries]
    if params in (None, {}):
        return tuple(found)
    if not isinstance(params, dict):
        message = f"custom_params is {str(params)[:MAX_SHOWN]!r}; an object is needed"
        raise ApiError(400, message, param="custom_params")
    if len(found) > 1 or found[0].params:
        message = (
            "custom_params are of one processor; "
            'give several as [{"name": ..., "params": {...}}, ...]'
        )
        raise ApiError(400, message, param="custom_params")
    return (Processor(found[0].name, params),)


def _processor(entry: Any) -> Processor:
    param = "custom_logit_processor"
    name = entry
    params: JsonObject = {}
    if isinstance(entry, dict):
        try:
            one = msgspec.convert(entry, NamedProcessor)
        except msgspec.ValidationError as exc:
            wrong = converted_field(exc, entry, within=param)
            message = f"{wrong.text}; name and params are allowed"
            raise ApiError(400, message, param=param) from exc
        name = one.name
        params = one.params or {}
    if isinstance(name, str) and name.lstrip().startswith("{"):
        message = f"{param} is serialised code, and {_NO_CODE}"
        raise ApiError(400, message, param=param)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"{param} is {str(name)[:MAX_SHOWN]!r}; a name is needed"
        raise ApiError(400, message, param=param)
    return Processor(name, params)


class ThinkingSwitch(msgspec.Struct, kw_only=True):
    """`thinking` as Anthropic and others write it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


def thinking_budget(body: ExtraSamplingFields) -> int | None:
    """The thinking budget, from the first of its names that is given."""
    for name in _THINKING_BUDGET:
        budget: int | None = getattr(body, name)
        if budget is not None:
            return budget
    return None


def thinking_switch(
    thinking: bool | ThinkingSwitch | None,
    effort: str | None,
    budget: int | None,
) -> bool | None:
    """Whether the model should reason; None if the request does not specify it.

    `effort` "none" turns reasoning off.
    """
    if budget == 0:
        return False
    if isinstance(thinking, ThinkingSwitch):
        return thinking.type != "disabled"
    if thinking is None and effort == "none":
        return False
    return thinking


def soft_budget(
    thinking: bool | ThinkingSwitch | None,
    effort: str | None,
) -> int | None:
    """Tokens of reasoning that a switch allows, for models that reason; None: no limit.

    Other models ignore it.
    """
    if thinking_switch(thinking, effort, None) is False:
        return 0
    if isinstance(thinking, ThinkingSwitch):
        return thinking.budget_tokens
    return None

"""What a request says beside the numbers of sampling: tokens and words that it wants or not, stop patterns, a budget of
reasoning, logit processors. The same fields on all routes, in the spellings of vLLM and SGLang."""

from __future__ import annotations

import re
from typing import Any, Literal, TypedDict

import msgspec

from weft.messages.sampling import Processor
from weft.server.errors import ApiError

MAX_SHOWN = 64  # characters of a wrong value that are repeated
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,127}")
_NO_CODE = (
    "code in a request is never run. Give the name of a logit processor that the server was started with "
    "(--logit-processors, or an installed package), and its parameters in custom_params"
)


class ExtraSamplingFields(msgspec.Struct, kw_only=True):
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stop_regex: str | list[str] | None = None
    thinking_budget: int | None = None  # this and the next two are the same: ours, vLLM's, SGLang's
    thinking_token_budget: int | None = None
    max_thinking_tokens: int | None = None
    custom_logit_processor: Any = None  # a name, or a list of names and of {"name", "params"}
    custom_params: Any = None  # of one that is named without
    logits_processors: Any = None  # vLLM's, which are code


class NamedProcessor(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    params: dict[str, Any] | None = None


class ExtraSampling(TypedDict):
    """Fields of `SamplingParams`."""

    allowed_token_ids: tuple[int, ...]
    bad_words: tuple[str, ...]
    stop_regex: tuple[str, ...]
    thinking_budget: int | None
    processors: tuple[Processor, ...]


def extra_sampling(body: ExtraSamplingFields) -> ExtraSampling:
    """What the fields of `body` ask for. Raises `ApiError`; ranges are checked when they are submitted."""
    regex = body.stop_regex
    if body.allowed_token_ids == []:
        raise ApiError(
            400, "allowed_token_ids is empty: no token could be said", param="allowed_token_ids"
        )
    if body.logits_processors:
        raise ApiError(400, f"logits_processors: {_NO_CODE}", param="logits_processors")
    return ExtraSampling(
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        bad_words=tuple(body.bad_words or ()),
        stop_regex=(regex,) if isinstance(regex, str) else tuple(regex or ()),
        thinking_budget=thinking_budget(body),
        processors=_processors(body.custom_logit_processor, body.custom_params),
    )


def thinking_budget(body: ExtraSamplingFields) -> int | None:
    """Under the first of its names that is given."""
    budgets = body.thinking_budget, body.thinking_token_budget, body.max_thinking_tokens
    return next((one for one in budgets if one is not None), None)


def _processors(named: Any, params: Any) -> tuple[Processor, ...]:
    if not named:
        if params:
            raise ApiError(
                400,
                "custom_params are of no use without custom_logit_processor",
                param="custom_params",
            )
        return ()
    found = [_processor(one) for one in (named if isinstance(named, list) else [named])]
    if params in (None, {}):
        return tuple(found)
    if not isinstance(params, dict):
        raise ApiError(
            400,
            f"custom_params is {str(params)[:MAX_SHOWN]!r}; an object is needed",
            param="custom_params",
        )
    if len(found) > 1 or found[0].params:
        message = 'custom_params are of one processor; give several as [{"name": ..., "params": {...}}, ...]'
        raise ApiError(400, message, param="custom_params")
    return (Processor(found[0].name, params),)


def _processor(given: Any) -> Processor:
    param = "custom_logit_processor"
    if isinstance(given, dict):
        try:
            one = msgspec.convert(given, NamedProcessor)
        except msgspec.ValidationError as exc:
            raise ApiError(400, f"{param}: {exc}; there are name and params", param=param) from exc
        name, params = one.name, one.params or {}
    else:
        name, params = given, {}
    if isinstance(name, str) and name.lstrip().startswith("{"):
        raise ApiError(400, f"{param} is serialised code, and {_NO_CODE}", param=param)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ApiError(400, f"{param} is {str(name)[:MAX_SHOWN]!r}; a name is needed", param=param)
    return Processor(name, params)


class ThinkingSwitch(msgspec.Struct, kw_only=True):
    """`thinking` as Anthropic and others write it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


def thinking_switch(
    thinking: bool | ThinkingSwitch | None, effort: str | None, budget: int | None
) -> bool | None:
    """Whether there is to be reasoning; None: nothing is said about it. `effort` may be "none"."""
    if isinstance(thinking, ThinkingSwitch):
        thinking = thinking.type != "disabled"
    if thinking is None and effort == "none":
        thinking = False
    return False if budget == 0 else thinking


def soft_budget(thinking: bool | ThinkingSwitch | None, effort: str | None) -> int | None:
    """Tokens of reasoning that a switch leaves, for models that reason; others have no use for it."""
    if thinking_switch(thinking, effort, None) is False:
        return 0
    return thinking.budget_tokens if isinstance(thinking, ThinkingSwitch) else None

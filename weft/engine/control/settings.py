"""Settings that can be changed while the engine runs: the options that are declared `changeable`
(`config/scheduling.py`) and the log level. Others are refused. Also the handlers of these requests.

A request changes all of its settings or none. Changes take effect in the next step; running
requests continue. Limits for which memory was allocated at the start can be lowered, and raised
again up to their first values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from weft.config.options import Option, options_of
from weft.config.scheduling import SchedulingOptions
from weft.engine.services import Services
from weft.messages.control import (
    ConfigureLogging,
    ConfigureLoggingReply,
    GetInternalState,
    GetInternalStateReply,
    SetInternalState,
    SetInternalStateReply,
    Setting,
    SlowDown,
    SlowDownReply,
)
from weft.observe import log
from weft.scheduler.settings import SchedulerSettings

LOG_LEVEL = "log_level"  # the only one that is not a setting of the scheduler

# From a value and the current settings: what is expected, or "" if the value is allowed.
Check: TypeAlias = Callable[[Setting, SchedulerSettings], str]
Bound: TypeAlias = Callable[[SchedulerSettings], int]


class BadSetting(ValueError):
    """No setting was changed, because of the setting `name`; the message says what is allowed."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def _one_of(names: tuple[str, ...]) -> Check:
    allowed = f"one of {', '.join(names)} is expected"
    return lambda value, settings: "" if value in names else allowed


def _words(option: Option) -> Check:
    """The check of an option for words."""

    def expected(value: Setting, settings: SchedulerSettings) -> str:
        return option.wrong_word(value)

    return expected


def _switch(value: Setting, settings: SchedulerSettings) -> str:
    return "" if isinstance(value, bool) else "true or false is expected"


def _number(low: float, high: float | None) -> Check:
    """A number from `low` up to `high`."""
    allowed = f"at least {low:g}" if high is None else f"{low:g} to {high:g}"
    allowed += " is expected"

    def expected(value: Setting, settings: SchedulerSettings) -> str:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return allowed
        is_allowed = low <= value and (high is None or value <= high)
        return "" if is_allowed else allowed

    return expected


def _integer(low: Bound, high: Bound | None = None) -> Check:
    """A whole number from `low` up to `high`.

    `low` gets the current settings, `high` the settings for which memory was allocated.
    """

    def expected(value: Setting, settings: SchedulerSettings) -> str:
        least = low(settings)
        allowed = f"a whole number, at least {least:,}"
        is_allowed = type(value) is int and value >= least
        if high is not None:
            most = high(settings.sized_for)
            allowed += f", at most {most:,} as at the start"
            is_allowed = is_allowed and type(value) is int and value <= most
        return "" if is_allowed else f"{allowed} is expected"

    return expected


def _check_of(option: Option) -> Check:
    """The check that follows from the declaration of an option."""
    low = option.low or 0
    if option.choices or option.judge:
        return _words(option)
    if option.is_switch:
        return _switch
    if isinstance(option.default, float):
        return _number(low, option.high)
    assert isinstance(option.default, int), f"{option.name}: a text has no check"
    return _integer(lambda settings: int(low))


# Checks that do not follow from a declaration: in these options 0 and -1 are words of the command
# line, and memory was allocated for the first values.
SIZED: dict[str, Check] = {
    "max_running_requests": _integer(
        lambda settings: 1, lambda sized_for: sized_for.max_running_requests
    ),
    "max_prefill_tokens": _integer(
        lambda settings: settings.page_size, lambda sized_for: sized_for.max_prefill_tokens
    ),
    "chunked_prefill_size": _integer(
        lambda settings: settings.page_size,
        lambda sized_for: sized_for.chunk_len or sized_for.context_length,
    ),
}


def _changeable() -> dict[str, Check]:
    """The check of each option that can be changed, by name."""
    checks: dict[str, Check] = {}
    for option in options_of(SchedulingOptions):
        if option.changeable:
            checks[option.name] = SIZED.get(option.name) or _check_of(option)
    checks[LOG_LEVEL] = _one_of(tuple(log.LEVELS))
    return checks


CHANGEABLE = _changeable()


def current(settings: SchedulerSettings) -> dict[str, Setting]:
    """The current values. A chunked_prefill_size of -1: prompts are never cut."""
    values: dict[str, Setting] = {}
    for name in CHANGEABLE:
        if name != LOG_LEVEL:
            values[name] = getattr(settings, name)
    values[LOG_LEVEL] = log.get_level()
    return values


def checked(settings: SchedulerSettings, asked: Mapping[str, Setting]) -> SchedulerSettings:
    """`settings` with the new values. Raises `BadSetting` for the first that is not allowed."""
    changes: dict[str, Any] = {}
    for name, value in asked.items():
        if name not in CHANGEABLE:
            known = ", ".join(CHANGEABLE)
            raise BadSetting(name, f"{name[:64]!r} cannot be changed while running; {known} can")
        expected = CHANGEABLE[name](value, settings)
        if expected:
            raise BadSetting(name, f"{name} is {str(value)[:64]!r}; {expected}")
        if name != LOG_LEVEL:
            changes[name] = value
    return replace(settings, **changes, started_with=settings.sized_for)


# ---- handlers


def get_internal_state(services: Services, message: GetInternalState) -> GetInternalStateReply:
    ratio = services.scheduler.prefills.new_token_ratio
    state: dict[str, Setting] = {
        "init_new_token_ratio": ratio.init,
        "min_new_token_ratio": ratio.min,
        "forward_sleep_time": services.idle.min_step_s or None,
    }
    return GetInternalStateReply(
        server_args=current(services.scheduler.settings), state=state, stats=services.stats()
    )


def set_internal_state(services: Services, message: SetInternalState) -> SetInternalStateReply:
    scheduler = services.scheduler
    before = current(scheduler.settings)
    try:
        settings = checked(scheduler.settings, message.server_args)
    except BadSetting as exc:
        return SetInternalStateReply(success=False, name=exc.name, message=str(exc))
    scheduler.apply(settings)
    if LOG_LEVEL in message.server_args:
        log.set_level(str(message.server_args[LOG_LEVEL]))
        services.observers.prefill_log.follow_level()
    changed = {name: before[name] for name in message.server_args}
    return SetInternalStateReply(success=True, before=changed)


def configure_logging(services: Services, message: ConfigureLogging) -> ConfigureLoggingReply:
    before = log.get_level()
    expected = CHANGEABLE[LOG_LEVEL](message.log_level, services.scheduler.settings)
    if expected:
        reason = f"log_level is {message.log_level[:64]!r}; {expected}"
        return ConfigureLoggingReply(success=False, before=before, message=reason)
    log.set_level(message.log_level)
    services.observers.prefill_log.follow_level()
    return ConfigureLoggingReply(success=True, before=before)


def slow_down(services: Services, message: SlowDown) -> SlowDownReply:
    """The caller of `Engine.step` lets the time pass; the engine itself does not wait."""
    before = services.idle.min_step_s
    services.idle.min_step_s = message.forward_sleep_time or 0.0
    return SlowDownReply(before_s=before or None)

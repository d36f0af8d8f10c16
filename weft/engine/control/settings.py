"""What can be changed while the engine runs: a line in `CHANGEABLE` each, and anything else is
refused. The handlers of these requests.

A change is all or nothing, and takes effect with the next step; what runs goes on. Limits for which
memory was laid out when the engine started can be lowered, and raised again up to their first
values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

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
from weft.scheduler import policies
from weft.scheduler.settings import SchedulerSettings

LOG_LEVEL = "log_level"  # the one that is no setting of the scheduler
MAX_CONSERVATIVENESS = 10.0

# Of a value and the settings in force: the values there may be, or nothing if this is one of them.
Check: TypeAlias = Callable[[Setting, SchedulerSettings], str]
Bound: TypeAlias = Callable[[SchedulerSettings], int]


class BadSetting(ValueError):
    """Nothing was changed, because of the setting `name`; the message says what is allowed."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True)
class Changeable:
    field: str  # of SchedulerSettings
    expected: Check


def _one_of(*names: str) -> Check:
    return lambda value, settings: "" if value in names else f"one of {', '.join(names)}"


def _switch(value: Setting, settings: SchedulerSettings) -> str:
    return "" if isinstance(value, bool) else "true or false"


def _conservativeness(value: Setting, settings: SchedulerSettings) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 0 <= float(value or 0) <= MAX_CONSERVATIVENESS:
        return ""
    return f"0 to {MAX_CONSERVATIVENESS:g}"


def _whole(low: Bound, high: Bound | None = None) -> Check:
    """A whole number from `low` up to `high`.

    `low` looks at the settings in force, `high` at those that memory was laid out for.
    """

    def expected(value: Setting, settings: SchedulerSettings) -> str:
        least = low(settings)
        allowed = f"a whole number, at least {least:,}"
        is_allowed = type(value) is int and value >= least
        if high is not None:
            most = high(settings.sized_for)
            allowed += f", at most {most:,} as at the start"
            is_allowed = is_allowed and type(value) is int and value <= most
        return "" if is_allowed else allowed

    return expected


CHANGEABLE = {
    "schedule_policy": Changeable("policy", _one_of(*policies.names())),
    "schedule_conservativeness": Changeable("schedule_conservativeness", _conservativeness),
    "max_running_requests": Changeable(
        "max_running_requests",
        _whole(lambda settings: 1, lambda sized_for: sized_for.max_running_requests),
    ),
    "max_queued_requests": Changeable("max_queued_requests", _whole(lambda settings: 0)),
    "max_queued_tokens": Changeable("max_queued_tokens", _whole(lambda settings: 0)),
    "max_prefill_tokens": Changeable(
        "max_prefill_tokens",
        _whole(lambda settings: settings.page_size, lambda sized_for: sized_for.max_prefill_tokens),
    ),
    "chunked_prefill_size": Changeable(
        "chunked_prefill_size",
        _whole(
            lambda settings: settings.page_size,
            lambda sized_for: sized_for.chunked_prefill_size or sized_for.context_length,
        ),
    ),
    "mixed_chunk": Changeable("mixed_chunk", _switch),
    LOG_LEVEL: Changeable("", _one_of(*log.LEVELS)),
}


def current(settings: SchedulerSettings) -> dict[str, Setting]:
    """The values in force. A chunked_prefill_size of -1: prompts are never cut."""
    values: dict[str, Setting] = {}
    for name, one in CHANGEABLE.items():
        if one.field:
            values[name] = getattr(settings, one.field)
    values["chunked_prefill_size"] = settings.chunked_prefill_size or -1
    values[LOG_LEVEL] = log.get_level()
    return values


def checked(settings: SchedulerSettings, asked: Mapping[str, Setting]) -> SchedulerSettings:
    """`settings` with the new values. Raises `BadSetting` for the first that is not allowed."""
    changes: dict[str, Any] = {}
    for name, value in asked.items():
        if name not in CHANGEABLE:
            known = ", ".join(CHANGEABLE)
            raise BadSetting(name, f"{name[:64]!r} cannot be changed while running; {known} can")
        one = CHANGEABLE[name]
        expected = one.expected(value, settings)
        if expected:
            raise BadSetting(name, f"{name} is {str(value)[:64]!r}; {expected} is expected")
        if one.field:
            changes[one.field] = value
    return replace(settings, **changes, started_with=settings.sized_for)


# ---- handlers


def get_internal_state(services: Services, message: GetInternalState) -> GetInternalStateReply:
    ratio = services.scheduler.new_token_ratio
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
    changed = {name: before[name] for name in message.server_args}
    return SetInternalStateReply(success=True, before=changed)


def configure_logging(services: Services, message: ConfigureLogging) -> ConfigureLoggingReply:
    before = log.get_level()
    expected = CHANGEABLE[LOG_LEVEL].expected(message.log_level, services.scheduler.settings)
    if expected:
        reason = f"log_level is {message.log_level[:64]!r}; {expected} is expected"
        return ConfigureLoggingReply(success=False, before=before, message=reason)
    log.set_level(message.log_level)
    return ConfigureLoggingReply(success=True, before=before)


def slow_down(services: Services, message: SlowDown) -> SlowDownReply:
    """The caller of `Engine.step` lets the time pass: the engine itself does not wait."""
    before = services.idle.min_step_s
    services.idle.min_step_s = message.forward_sleep_time or 0.0
    return SlowDownReply(before_s=before or None)

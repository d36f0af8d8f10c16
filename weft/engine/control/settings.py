"""What can be changed while the engine runs: a line in `CHANGEABLE` each. Anything else is refused.

A change is all or nothing, and takes effect with the next step; what runs goes on. Limits for which memory was laid out
when the engine started can be lowered, and raised again up to what they were then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from weft.messages.codec import FromEngine
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
    Stats,
)
from weft.observe import log
from weft.scheduler.policy import POLICIES
from weft.scheduler.ratio import NewTokenRatio
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.settings import SchedulerSettings

LOG_LEVEL = "log_level"  # the one that is no setting of the scheduler
MAX_CONSERVATIVENESS = 10.0


class Engine(Protocol):
    """What is needed of `service/engine.py`."""

    scheduler: Scheduler
    min_step_s: float

    def stats(self) -> Stats: ...


class BadSetting(ValueError):
    """Nothing was changed, because of the setting `name`; the message says what is allowed."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True)
class Changeable:
    """`expected` says what values there may be; nothing if this one may."""

    field: str  # of SchedulerSettings
    expected: Callable[[Setting, SchedulerSettings], str]


def _one_of(*names: str) -> Callable[[Setting, SchedulerSettings], str]:
    return lambda value, settings: "" if value in names else f"one of {', '.join(names)}"


def _switch(value: Setting, settings: SchedulerSettings) -> str:
    return "" if isinstance(value, bool) else "true or false"


def _conservativeness(value: Setting, settings: SchedulerSettings) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (
        ""
        if is_number and 0 <= float(value or 0) <= MAX_CONSERVATIVENESS
        else f"0 to {MAX_CONSERVATIVENESS:g}"
    )


def _whole(
    low: Callable[[SchedulerSettings], int], high: Callable[[SchedulerSettings], int] | None = None
) -> Callable[[Setting, SchedulerSettings], str]:
    """A whole number from `low` up to `high`, which looks at the settings that memory was laid out for."""

    def expected(value: Setting, settings: SchedulerSettings) -> str:
        least, most = low(settings), None if high is None else high(settings.sized_for)
        if type(value) is int and value >= least and (most is None or value <= most):
            return ""
        return f"a whole number, at least {least:,}" + (
            "" if most is None else f", at most {most:,} as at the start"
        )

    return expected


CHANGEABLE = {
    "schedule_policy": Changeable("policy", _one_of(*POLICIES)),
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
    values: dict[str, Setting] = {
        name: getattr(settings, one.field) for name, one in CHANGEABLE.items() if one.field
    }
    values["chunked_prefill_size"] = settings.chunked_prefill_size or -1
    values[LOG_LEVEL] = log.get_level()
    return values


def checked(settings: SchedulerSettings, asked: Mapping[str, Setting]) -> SchedulerSettings:
    """`settings` with what was asked for. Raises `BadSetting` for the first that cannot be."""
    for name, value in asked.items():
        if name not in CHANGEABLE:
            raise BadSetting(
                name, f"{name[:64]!r} cannot be changed while running; {', '.join(CHANGEABLE)} can"
            )
        expected = CHANGEABLE[name].expected(value, settings)
        if expected:
            raise BadSetting(name, f"{name} is {str(value)[:64]!r}; {expected} is expected")
    changes = {
        CHANGEABLE[name].field: value for name, value in asked.items() if CHANGEABLE[name].field
    }
    return replace(settings, **changes, started_with=settings.sized_for)  # type: ignore[arg-type]


def apply(scheduler: Scheduler, settings: SchedulerSettings) -> None:
    """Let the scheduler go by these settings from its next step on. Requests beyond a lower limit run to their end."""
    before = scheduler.settings
    if settings.policy != before.policy:
        scheduler.set_policy(settings.policy)
    if settings.schedule_conservativeness != before.schedule_conservativeness:
        scheduler.new_token_ratio = NewTokenRatio(settings.schedule_conservativeness)
    scheduler.kv.rows.limit = settings.max_running_requests
    scheduler.settings = settings
    scheduler.batch_is_full = False  # there may be room now


# Handlers


def get_internal_state(engine: Engine, message: GetInternalState) -> FromEngine:
    ratio = engine.scheduler.new_token_ratio
    return GetInternalStateReply(
        call=message.call,
        settings=current(engine.scheduler.settings),
        state={
            "init_new_token_ratio": ratio.init,
            "min_new_token_ratio": ratio.min,
            "forward_sleep_time": engine.min_step_s or None,
        },
        stats=engine.stats(),
    )


def set_internal_state(engine: Engine, message: SetInternalState) -> FromEngine:
    scheduler = engine.scheduler
    before = current(scheduler.settings)
    try:
        settings = checked(scheduler.settings, message.settings)
    except BadSetting as exc:
        return SetInternalStateReply(
            call=message.call, success=False, name=exc.name, message=str(exc)
        )
    apply(scheduler, settings)
    if LOG_LEVEL in message.settings:
        log.set_level(str(message.settings[LOG_LEVEL]))
    changed = {name: before[name] for name in message.settings}
    return SetInternalStateReply(call=message.call, success=True, before=changed)


def configure_logging(engine: Engine, message: ConfigureLogging) -> FromEngine:
    before = log.get_level()
    expected = CHANGEABLE[LOG_LEVEL].expected(message.log_level, engine.scheduler.settings)
    if expected:
        reason = f"log_level is {message.log_level[:64]!r}; {expected} is expected"
        return ConfigureLoggingReply(
            call=message.call, success=False, before=before, message=reason
        )
    log.set_level(message.log_level)
    return ConfigureLoggingReply(call=message.call, success=True, before=before)


def slow_down(engine: Engine, message: SlowDown) -> FromEngine:
    """Only says so: whoever calls `Engine.step` lets the time pass, for the engine itself does not wait."""
    before, engine.min_step_s = engine.min_step_s, message.step_s or 0.0
    return SlowDownReply(call=message.call, before_s=before or None)

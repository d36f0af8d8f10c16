"""The hooks of services, and the list of the services that are attached at present.

A service is work of the engine besides running steps: it pauses generation, changes weights, closes
sessions, or answers health checks. It overrides the hooks that it needs. It attaches itself when it
has work and detaches itself afterwards, so a step visits only services with work.

    message ─▶ handler ─▶ service ── attach, or begin_work if the engine must step for it
                             │
        refuses, opened      │  a request arrives
        before_step          │  ┐
        (step of the loop)   │  │ `Engine.step`
        filter_output        │  │
        after_step           │  ┘
        wake_at              │  the caller of `Engine.step` has nothing to do
                             └─ detach

This module knows no service, and no request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.messages.replies import StepOutput
from weft.messages.requests import GenerateRequest
from weft.scheduler.limits import Refusal

SOON = -math.inf  # value of `wake_at` if the service must be asked again


class Service:
    """Override the hooks that the service needs. No hook may wait; times are seconds of the
    engine's clock.

    A hook that raises ends no request: the guard counts the exception, and the hook is called again
    in the next step.
    """

    name = "a service"  # for log lines
    holds_steps = False  # no step may be planned while the service is attached

    def wake_at(self) -> float:
        """When a step will find work here: a time, `SOON`, or infinite (not before a message)."""
        return math.inf

    def refuses(self, message: GenerateRequest, now: float) -> Refusal | None:
        """A request has come. Returns why it cannot be opened; None if it can."""
        return None

    def opened(self, message: GenerateRequest, now: float) -> None:
        """The request of this message has been opened and is in the waiting queue."""

    def before_step(self, now: float) -> None:
        """A step begins."""

    def after_step(self, now: float) -> None:
        """A step has ended, and its output will be sent."""

    def filter_output(self, output: StepOutput) -> StepOutput | None:
        """Called before output is sent. Returns the part of it that is for the front."""
        return output


class ServiceHooks:
    """The attached services by hook. Tuples are replaced, never changed, because a service may
    detach itself while it is called.

    Services are called in their order, except `after_step`, which is called in reverse order: the
    first service of `before_step` is the last of `after_step`.
    """

    def __init__(self) -> None:
        self._services: tuple[Service, ...] = ()  # all services, in order
        self.attached: tuple[Service, ...] = ()
        self.refuses: tuple[Service, ...] = ()
        self.opened: tuple[Service, ...] = ()
        self.before_step: tuple[Service, ...] = ()
        self.after_step: tuple[Service, ...] = ()
        self.filter_output: tuple[Service, ...] = ()
        self.holds_steps = False
        self.working: set[Service] = set()  # attached services for which the engine must step

    def arrange(self, services: Sequence[Service]) -> None:
        """Set all services of the engine, in the order of their calls. None is attached."""
        self._services = tuple(services)

    def attach(self, service: Service) -> None:
        """Call this service from now on. Does nothing if it is attached."""
        if service not in self.attached:
            self._replace([*self.attached, service])

    def detach(self, service: Service) -> None:
        """Stop calling this service. Does nothing if it is not attached."""
        self.working.discard(service)
        if service in self.attached:
            self._replace([other for other in self.attached if other is not service])

    # A service reports the beginning and the end of its work, so that steps need not ask.

    def begin_work(self, service: Service) -> None:
        """Attach this service and let the engine step without waiting for messages, until
        `end_work` or `detach`."""
        self.working.add(service)
        self.attach(service)

    def end_work(self, service: Service) -> None:
        """The service stays attached, but the engine no longer steps for it."""
        self.working.discard(service)

    def _replace(self, attached: Sequence[Service]) -> None:
        # Built again on each change, which is rare, so that a step only iterates over tuples.
        in_order = [service for service in self._services if service in attached]
        self.attached = tuple(in_order)
        self.refuses = self._overriding("refuses")
        self.opened = self._overriding("opened")
        self.before_step = self._overriding("before_step")
        self.after_step = self._overriding("after_step")[::-1]
        self.filter_output = self._overriding("filter_output")
        self.holds_steps = any(service.holds_steps for service in self.attached)

    def _overriding(self, hook: str) -> tuple[Service, ...]:
        """The attached services that override this hook."""
        empty = getattr(Service, hook)
        found = []
        for service in self.attached:
            own = getattr(type(service), hook)
            if own is not empty:
                found.append(service)
        return tuple(found)

"""The moments at which the engine asks its services, and which services are asked at present.

A service is what the engine does beside running steps: it pauses generation, changes weights,
closes sessions, answers health checks. It overrides the hooks that it needs. It attaches itself
when there is something to do and detaches itself afterwards, so a step visits only services with
work at hand.

    message ─▶ handler ─▶ service ── attach, or begin_work if the engine is to step for it
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

SOON = -math.inf  # `wake_at` of a service that must be asked again to find out


class Service:
    """Override what is needed. No hook waits for anything; times are in seconds of the engine's
    clock.

    A hook that raises ends no request: the guard counts it, and it is called again with the next
    step.
    """

    name = "a service"  # in log lines
    holds_steps = False  # no step may be planned while the service is attached

    def wake_at(self) -> float:
        """When a step will find something to do here: a time, `SOON`, or infinite (not before a
        message)."""
        return math.inf

    def refuses(self, message: GenerateRequest, now: float) -> Refusal | None:
        """A request has come. Returns why it cannot be opened, if it cannot."""
        return None

    def opened(self, message: GenerateRequest, now: float) -> None:
        """The request of this message has been opened: it stands in the waiting queue."""

    def before_step(self, now: float) -> None:
        """A step begins."""

    def after_step(self, now: float) -> None:
        """A step has ended, and its output is on the way."""

    def filter_output(self, output: StepOutput) -> StepOutput | None:
        """Output is about to be sent. Returns what of it is for the front."""
        return output


class ServiceHooks:
    """The attached services by hook. Tuples are replaced, never changed: a service may detach
    itself while it is being asked.

    Services are asked in their order, but `after_step` in the opposite one: the first to see a step
    begin is the last to see it end.
    """

    def __init__(self) -> None:
        self._services: tuple[Service, ...] = ()  # all, in their order
        self.attached: tuple[Service, ...] = ()
        self.refuses: tuple[Service, ...] = ()
        self.opened: tuple[Service, ...] = ()
        self.before_step: tuple[Service, ...] = ()
        self.after_step: tuple[Service, ...] = ()
        self.filter_output: tuple[Service, ...] = ()
        self.holds_steps = False
        self._working: set[Service] = set()  # attached, and the engine is to step for them

    @property
    def has_work(self) -> bool:
        """Whether the engine should step without waiting for a message."""
        return bool(self._working)

    def arrange(self, services: Sequence[Service]) -> None:
        """All services of the engine, in the order in which they are asked. None is attached."""
        self._services = tuple(services)

    def attach(self, service: Service) -> None:
        """Ask this service from now on. Does nothing if it is attached."""
        if service not in self.attached:
            self._replace([*self.attached, service])

    def detach(self, service: Service) -> None:
        """Ask this service no more. Does nothing if it is not attached."""
        self._working.discard(service)
        if service in self.attached:
            self._replace([other for other in self.attached if other is not service])

    # A service says when its work begins and ends, so that no step has to ask.

    def begin_work(self, service: Service) -> None:
        """Attach this service; the engine steps without waiting for a message until `end_work` or
        `detach`."""
        self._working.add(service)
        self.attach(service)

    def end_work(self, service: Service) -> None:
        """The service stays attached, and the engine need not step for it."""
        self._working.discard(service)

    def _replace(self, attached: Sequence[Service]) -> None:
        # Made anew on each change, which is rare, so that a step only walks over tuples.
        in_order = [service for service in self._services if service in attached]
        self.attached = tuple(in_order)
        self.refuses = self._overriding("refuses")
        self.opened = self._overriding("opened")
        self.before_step = self._overriding("before_step")
        self.after_step = self._overriding("after_step")[::-1]
        self.filter_output = self._overriding("filter_output")
        self.holds_steps = any(service.holds_steps for service in self.attached)

    def _overriding(self, hook: str) -> tuple[Service, ...]:
        """The attached services with a hook of their own of this name."""
        empty = getattr(Service, hook)
        found = []
        for service in self.attached:
            own = getattr(type(service), hook)
            if own is not empty:
                found.append(service)
        return tuple(found)

"""Work for the device that is no step, one at a time: while it is under way, or memory is released, no step runs.

    submit ─▶ jobs ── nothing in flight ─▶ runner.control ── done ─▶ what follows for requests and cache ─▶ the reply

Messages are taken in all the while; requests wait in the queue, and end by their deadlines. It sees no tensor: what the
core has to know stands in a `DeviceReply`, which the journal records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

from weft.engine.pause import Pause
from weft.messages.codec import FromEngine
from weft.messages.requests import Abort
from weft.messages.weights import FIRST_VERSION
from weft.observe.log import EventLog
from weft.plan.device import DeviceReply, DeviceRequest, Done, Pending
from weft.plan.step import Runner
from weft.scheduler.limits.refusal import Refusal
from weft.scheduler.scheduler import Scheduler

WHY = "memory of the engine is released until POST /resume_memory_occupation"

log = EventLog("engine")


class Engine(Protocol):
    """What is needed of `service/engine.py`."""

    scheduler: Scheduler
    pause: Pause
    device: Device

    def settle(self) -> None: ...


Answer: TypeAlias = Callable[[Engine, DeviceReply, int], FromEngine]


class Job(NamedTuple):
    """A device request, and what follows from it."""

    request: DeviceRequest
    answer: Answer  # of the reply and the number of requests that were hit
    needs_idle: bool = False  # refused while a request holds KV memory; the cache is emptied
    weight_version: str | None = None
    aborts: bool = False  # open requests end if it succeeds
    is_whole: bool = False  # the weights can be loaded again from where these come


class Device:
    def __init__(self) -> None:
        self.released: tuple[str, ...] = ()
        self.weight_version = FIRST_VERSION
        self._source_version = FIRST_VERSION  # of the weights where they can be loaded again
        self._jobs: deque[Job] = deque()
        self._current: tuple[Job, Pending] | None = None

    @property
    def is_busy(self) -> bool:
        return self._current is not None or bool(self._jobs)

    @property
    def is_free(self) -> bool:
        """Whether steps may run."""
        return not self.is_busy and not self.released

    @property
    def refusal(self) -> Refusal | None:
        """Why new requests cannot be taken in now, if they cannot."""
        return Refusal(f"{WHY} ({', '.join(self.released)})", 503) if self.released else None

    def ask(self, job: Job) -> None:
        """Do this after what has been asked for before."""
        self._jobs.append(job)

    def turn(self, engine: Engine, runner: Runner) -> list[FromEngine]:
        """Begin the next job, or end the one that is done. Returns its reply."""
        if self._current is None:
            if self._jobs:
                engine.settle()
                job = self._jobs.popleft()
                self._current = job, self._begun(engine, runner, job)
            return []
        job, pending = self._current
        if not pending.done():
            return []
        self._current = None
        reply = pending.result()
        return [job.answer(engine, reply, self._take_in(engine, job, reply))]

    def _begun(self, engine: Engine, runner: Runner, job: Job) -> Pending:
        if job.needs_idle and not engine.scheduler.flush_cache():
            stats = engine.scheduler.stats()
            message = f"{stats.num_running} requests hold KV memory; end them, or pause_generation with mode retract"
            return Done(DeviceReply(ok=False, message=message, released=self.released))
        return runner.control(job.request)

    def _take_in(self, engine: Engine, job: Job, reply: DeviceReply) -> int:
        """What follows for the engine. Returns how many requests were hit."""
        scheduler = engine.scheduler
        self.released = reply.released
        if reply.is_reloaded:
            self.weight_version = self._source_version
        num_hit = 0
        if reply.ok and job.aborts:
            num_hit = len(scheduler.requests)
            scheduler.abort(Abort(all=True, message="the weights were updated"))
        if reply.kv_is_stale:
            num_hit += len(scheduler.requests) - len(scheduler.waiting_queue)
            scheduler.recompute(set(), "", "the weights were updated")
        if reply.ok and reply.kv_is_stale:
            self.weight_version = job.weight_version or self.weight_version
            if job.is_whole:
                self._source_version = self.weight_version
        log.info(
            "device_request",
            request=type(job.request).__name__,
            success=reply.ok,
            tensors=reply.num_tensors,
            bytes=reply.num_bytes,
            requests=num_hit,
            weight_version=self.weight_version,
            released=",".join(self.released) or "-",
        )
        return num_hit

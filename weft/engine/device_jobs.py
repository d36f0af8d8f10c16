"""Work of the device besides steps, one job at a time: new weights, memory released and resumed.

    submit ─▶ jobs ── nothing in flight ─▶ runner.control ── done ─▶ requests, cache ─▶ reply

No step runs while a job is in progress or memory is released. Messages are processed all the time;
requests wait in the queue, and end by their deadlines. This module sees no tensor: the scheduler
learns the result from a `DeviceReply`, which the journal records.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from weft.engine.core import EngineCore
from weft.engine.hooks import SOON, Service
from weft.engine.pause import Pause
from weft.messages.codec import FromEngine
from weft.messages.requests import Abort, GenerateRequest
from weft.messages.weights import FIRST_VERSION
from weft.observe.log import EventLog
from weft.plan.device import DeviceReply, DeviceRequest, Done, Pending
from weft.plan.step import Runner
from weft.scheduler.history import Stop
from weft.scheduler.limits import Refusal

WHY = "memory of the engine is released until POST /resume_memory_occupation"

log = EventLog("engine")


class JobResult(NamedTuple):
    """The result of a job, for its answer."""

    reply: DeviceReply
    weight_version: str  # in use from now on
    num_requests: int  # aborted, or computed again


Answer: TypeAlias = Callable[[JobResult], FromEngine | None]  # None: no call waits for an answer


class DeviceJob(NamedTuple):
    """A request to the device, and its consequences."""

    request: DeviceRequest
    answer: Answer
    needs_idle: bool = False  # refused while a request owns KV memory; the cache is emptied
    weight_version: str | None = None
    aborts: bool = False  # open requests end if it succeeds
    from_checkpoint: bool = False  # whether the weights can be loaded again from the same place
    is_logged: bool = True  # false for frequent requests


class DeviceJobs(Service):
    """Attached while there are jobs, or memory is released."""

    name = "device jobs"
    holds_steps = True

    def __init__(self, core: EngineCore, runner: Runner, pause: Pause) -> None:
        self._core = core
        self._runner = runner
        self._pause = pause
        self.released: tuple[str, ...] = ()  # released kinds of memory
        self.weight_version = FIRST_VERSION
        self._checkpoint_version = FIRST_VERSION  # version of the weights that can be loaded again
        self._jobs: deque[DeviceJob] = deque()
        self._current: tuple[DeviceJob, Pending] | None = None
        # Sent after the output of the current step, because that was computed before.
        self._reply: FromEngine | None = None

    @property
    def is_busy(self) -> bool:
        return self._current is not None or bool(self._jobs)

    @property
    def is_free(self) -> bool:
        """Whether steps may run."""
        return not self.is_busy and not self.released

    def submit(self, job: DeviceJob) -> None:
        """Run this job after those that are queued. Its answer is sent after a later step."""
        self._jobs.append(job)
        self._core.hooks.begin_work(self)

    def wake_at(self) -> float:
        return SOON if self.is_busy else math.inf

    def refuses(self, message: GenerateRequest, now: float) -> Refusal | None:
        if not self.released:
            return None
        return Refusal(f"{WHY} ({', '.join(self.released)})", 503)

    def before_step(self, now: float) -> None:
        """End a job that is done, or begin the next one."""
        if self._current is None:
            self._begin_next()
            return
        job, pending = self._current
        if pending.done():
            self._current = None
            self._reply = job.answer(self._take_in(job, pending.result()))

    def after_step(self, now: float) -> None:
        if self._pause.mode is None:
            scheduler = self._core.scheduler
            scheduler.prefills.record_no_walk(scheduler.now, Stop.DEVICE)
        reply = self._reply
        self._reply = None
        if reply is not None:
            self._core.send(reply)
        if not self.is_busy:
            self._core.hooks.end_work(self)
        if self.is_free:
            self._core.hooks.detach(self)

    def _begin_next(self) -> None:
        if not self._jobs:
            return  # no job is left, but memory is released
        self._core.settle()
        job = self._jobs.popleft()
        self._current = job, self._begin(job)

    def _begin(self, job: DeviceJob) -> Pending:
        scheduler = self._core.scheduler
        if not job.needs_idle or scheduler.flush_cache():
            return self._runner.control(job.request)
        num_running = scheduler.stats().num_running
        message = (
            f"{num_running} requests hold KV memory; end them, "
            "or pause_generation with mode retract"
        )
        return Done(DeviceReply(ok=False, message=message, released=self.released))

    def _take_in(self, job: DeviceJob, reply: DeviceReply) -> JobResult:
        """Update requests, cache and version after a job. Returns its result."""
        scheduler = self._core.scheduler
        self.released = reply.released
        if reply.is_reloaded:
            self.weight_version = self._checkpoint_version
        num_requests = 0
        if reply.ok and job.aborts:
            num_requests = len(scheduler.requests)
            scheduler.abort(Abort(all=True, message="the weights were updated"))
        if reply.kv_is_stale or reply.is_reloaded:
            scheduler.kv.weights_changed()
        if reply.kv_is_stale:
            num_requests += len(scheduler.requests) - len(scheduler.waiting_queue)
            self._core.recovery.recompute(set(), "", "the weights were updated")
        # An update that failed halfway makes the KV stale, too, but it is not a new version.
        if reply.ok and reply.kv_is_stale:
            self.weight_version = job.weight_version or self.weight_version
            if job.from_checkpoint:
                self._checkpoint_version = self.weight_version
        if job.is_logged:
            log.info(
                "device_request",
                request=type(job.request).__name__,
                success=reply.ok,
                tensors=reply.num_tensors,
                bytes=reply.num_bytes,
                requests=num_requests,
                weight_version=self.weight_version,
                released=",".join(self.released) or "-",
            )
        return JobResult(reply, self.weight_version, num_requests)

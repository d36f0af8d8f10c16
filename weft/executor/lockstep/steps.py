"""Engines that take their steps together, because they have the experts of one model between them
(`--enable-dp-attention`). Each has its scheduler, and all of the model but for experts.

    plan ─▶ LockstepPass ─▶ its turn? ─▶ the steps of this engine ─▶ tokens
                                  └ no ─▶ an idle step: experts for the others
    no plan ─▶ LockstepDevice ─ another engine has begun ─▶ an idle step

Nobody but the runner knows of it: scheduler, messages and journal are those of an engine alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from threading import Lock
from typing import TypeVar

from weft.executor.device import DeviceOutput
from weft.executor.runner import Do, Pass, Run
from weft.observe.log import EventLog
from weft.ops.sharding import RankLost
from weft.parallel.lockstep import Lockstep, StepWish
from weft.plan.device import (
    DeviceReply,
    DeviceRequest,
    MeetOthers,
    ReceiveWeights,
    ReleaseMemory,
    ResumeMemory,
    UpdateFromDisk,
    UpdateFromTensors,
)
from weft.plan.step import ForwardMode, Plan, Result, Step

T = TypeVar("T")

# All engines do these at once: what one computes for another is of the same weights, and inputs are
# blocked and opened between the same steps.
TOGETHER = (
    UpdateFromDisk,
    UpdateFromTensors,
    ReceiveWeights,
    ReleaseMemory,
    ResumeMemory,
    MeetOthers,
)
NOT_TOGETHER = "another engine did not do the same in time; nothing was changed"
MEET_S = 10.0  # for which an engine waits until all want to do such a thing

log = EventLog("engine")


class LockstepPass(Pass):
    """On one of several engines: each step waits for its turn, and all engines have the same
    weights always."""

    name = "lockstep"

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = lockstep
        self._released: tuple[str, ...] = ()

    def run(self, plan: Plan, then: Run) -> DeviceOutput:
        is_decode = plan.mode is ForwardMode.DECODE
        self._lockstep.take_turn(StepWish.DECODE if is_decode else StepWish.PREFILL)
        try:
            return then(plan)
        except Exception as exc:
            self._lockstep.fail(exc)
            raise

    def do(self, request: DeviceRequest, then: Do) -> DeviceReply:
        if not isinstance(request, TOGETHER):
            return then(request)
        try:
            return self._do_together(request, then)
        except RankLost as exc:
            return self._failed(str(exc), 500)

    def _do_together(self, request: DeviceRequest, then: Do) -> DeviceReply:
        """Raises RankLost."""
        if not self._lockstep.meet(MEET_S):
            return self._failed(NOT_TOGETHER, 503)
        if isinstance(request, MeetOthers):
            is_in_time = time.monotonic() < request.until_s
            if not self._lockstep.all_say(is_in_time):
                return self._failed(NOT_TOGETHER, 503)
        reply = then(request)
        self._released = reply.released
        if not self._lockstep.is_common(reply.ok):
            why = "an engine refused what others have done"
            self._lockstep.peers.leave(why)
            raise RankLost(why)
        return reply

    def _failed(self, message: str, status: int) -> DeviceReply:
        return DeviceReply(ok=False, message=message, status=status, released=self._released)


class LockstepDevice:
    """The `StepDevice` of one of several engines. While the engine is idle, its thread listens to
    the others, and takes part in the steps that they begin."""

    def __init__(self, thread: Executor, lockstep: Lockstep) -> None:
        self._thread = thread
        self._lockstep = lockstep
        self._lock = Lock()
        self._num_waiting = 0  # work that has been handed in and has not begun
        self._is_closed = False
        thread.submit(self._listen)

    def launch(self, run: Callable[[Plan], DeviceOutput], plan: Plan) -> Step:
        return self._hand_in(partial(_result_of, run, plan))

    def submit(self, work: Callable[[], T]) -> Future[T]:
        return self._hand_in(work)

    def run_exclusive(self, work: Callable[[], T]) -> Future[T]:
        return self._hand_in(work)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._lockstep.peers.wake()
        self._thread.shutdown()
        self._lockstep.peers.close()

    def _hand_in(self, work: Callable[[], T]) -> Future[T]:
        with self._lock:
            self._num_waiting += 1
        future = self._thread.submit(self._do, work)
        self._thread.submit(self._listen)
        self._lockstep.peers.wake()
        return future

    def _do(self, work: Callable[[], T]) -> T:
        with self._lock:
            self._num_waiting -= 1
        return work()

    def _listen(self) -> None:
        """Take part in steps of others until this engine has work."""
        peers = self._lockstep.peers
        while not self._num_waiting and not self._is_closed:
            try:
                if peers.wait():
                    self._lockstep.join()
            except Exception as exc:
                self._lockstep.fail(exc)
                log.error("lockstep_lost", reason=str(exc) or type(exc).__name__)


def _result_of(run: Callable[[Plan], DeviceOutput], plan: Plan) -> Result:
    return run(plan).result()
